"""vLLM's OpenAI server."""

from collections.abc import Mapping
from typing import Any

from workflow.engines.launching import released_version, version_probe, versioned
from workflow.matrix import Row
from workflow.serving import Argv, ConfigFile, Emptying, Env, Probe, Service, VersionProbe, flags_of

# Block hashes are salted by Python's string hash. With a random seed per process, equal prefixes get different keys
# on different ranks and an external tier is never hit. It is part of every arm so that arms do not differ by it.
COMMON_ENV = {"PYTHONHASHSEED": "0"}


class Vllm:
    """`vllm serve`, with tensor parallelism, or data parallelism over attention behind a router."""

    name = "vllm"

    def service(self, row: Row, argv: Argv, env: Env, distributions: tuple[str, ...]) -> Service:
        """Return the engine's service; one HTTP port also under DP attention, where a router spreads the ranks."""
        size, data = (1, row.tp) if row.dp_attn else (row.tp, 1)
        fixed = ["vllm", "serve", "<path:model>", "--served-model-name", row.model]
        fixed += ["--host", "127.0.0.1", "--port", "<port:engine>"]
        fixed += ["--tensor-parallel-size", str(size), "--data-parallel-size", str(data)]
        fixed += ["--pipeline-parallel-size", str(row.pp)] if row.pp > 1 else []
        fixed += ["--decode-context-parallel-size", str(row.dcp_size)] if row.dcp_size > 1 else []
        fixed += ["--prefill-context-parallel-size", str(row.pcp_size)] if row.pcp_size > 1 else []
        fixed += ["--enable-expert-parallel"] if row.ep > 1 else []
        return Service(
            name="engine",
            argv=versioned((self.name, *distributions), (*fixed, *argv)),
            env={**COMMON_ENV, **env},
            # An image may carry them; each turns an arm into another one.
            unset=("LMCACHE_CONFIG_FILE", "VLLM_USE_SIMPLE_KV_OFFLOAD"),
            environment=None,
            # /health answers once weights are loaded and graphs captured: up to two hours from network storage.
            probe=Probe(port="engine", path="/health", deadline_s=float(env.get("VLLM_ENGINE_READY_TIMEOUT_S", 3600))),
        )

    def config_file(self, config: Mapping[str, Any]) -> ConfigFile | None:
        """None: vLLM is configured by its argv."""
        return None

    def versions(self, row: Row) -> tuple[VersionProbe, ...]:
        """The version is the image's tag where that is a release."""
        return (version_probe("vllm", "engine", released_version(row.image)),)

    def empties(self, argv: Argv) -> Emptying | None:
        """Device and connector in one call, which vLLM serves in its development mode only.

        None with data-parallel engines: the proof's prompts would not reach each of them.
        """
        if flags_of(argv).get("--data-parallel-size", ("1",)) != ("1",):
            return None
        path = "/reset_prefix_cache?reset_external=true"
        return Emptying(posts=(("engine", path),), env={"VLLM_SERVER_DEV_MODE": "1"})

    def metrics(self) -> tuple[tuple[str, str], ...]:
        """One endpoint for all ranks, labelled by engine."""
        return (("engine", "/metrics"),)
