"""SGLang's OpenAI server."""

from collections.abc import Mapping
from typing import Any

from workflow.engines.launching import released_version, version_probe, versioned
from workflow.matrix import Row
from workflow.serving import Argv, ConfigFile, Emptying, Env, Probe, Service, VersionProbe

# The client keeps a connection for 300 s, uvicorn closes an idle one after 5 s: a request that is sent while the server
# closes the socket ends in ECONNRESET, and a failed first request of a session aborts the whole replay.
COMMON_ENV = {"PYTHONHASHSEED": "0", "SGLANG_TIMEOUT_KEEP_ALIVE": "900"}


class SGLang:
    """`sglang.launch_server`, with tensor parallelism, or DP attention behind a router."""

    name = "sglang"

    def service(self, row: Row, argv: Argv, env: Env, distributions: tuple[str, ...]) -> Service:
        """Return the engine's service."""
        fixed = ["python3", "-m", "sglang.launch_server", "--model-path", "<path:model>"]
        fixed += ["--served-model-name", row.model, "--host", "127.0.0.1", "--port", "<port:engine>"]
        fixed += ["--tp", str(row.tp)]
        fixed += ["--pp-size", str(row.pp)] if row.pp > 1 else []
        fixed += ["--ep-size", str(row.ep)] if row.ep > 1 else []
        if row.dp_attn:
            # An own rendezvous port: the default is derived from the API port and collides on a shared node.
            fixed += ["--dp", str(row.tp), "--enable-dp-attention", "--dist-init-addr", "127.0.0.1:<port:rendezvous>"]
        # Without these two, the share of the prompt that came from the host cannot be read back.
        fixed += ["--enable-metrics", "--enable-cache-report"]
        return Service(
            name="engine",
            argv=versioned((self.name, *distributions), (*fixed, *argv)),
            env={**COMMON_ENV, **env},
            environment=None,
            probe=Probe(port="engine", path="/health", deadline_s=7200.0),
        )

    def config_file(self, config: Mapping[str, Any]) -> ConfigFile | None:
        """None: SGLang is configured by its argv."""
        return None

    def versions(self, row: Row) -> tuple[VersionProbe, ...]:
        """The version is the image's tag where that is a release."""
        return (version_probe("sglang", "engine", released_version(row.image)),)

    def empties(self, argv: Argv) -> Emptying | None:
        """None: not tried here on a running server, so not claimed."""
        return None

    def metrics(self) -> tuple[tuple[str, str], ...]:
        """One endpoint."""
        return (("engine", "/metrics"),)
