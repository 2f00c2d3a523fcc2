"""TensorRT-LLM's OpenAI server, called `trt` in search spaces; configured by a YAML file."""

from collections.abc import Mapping
from typing import Any

import yaml

from workflow.engines.launching import released_version, version_probe, versioned
from workflow.matrix import Row
from workflow.serving import Argv, ConfigFile, Emptying, Env, Probe, Service, VersionProbe


class TrtLlm:
    """`trtllm-serve` under mpirun, which starts one worker per GPU."""

    name = "trt"

    def service(self, row: Row, argv: Argv, env: Env, distributions: tuple[str, ...]) -> Service:
        """Return the engine's service; everything about the cache is in its configuration file."""
        fixed = ["mpirun", "-n", "1", "--oversubscribe", "--allow-run-as-root", "trtllm-serve", "<path:model>"]
        fixed += ["--tp_size", str(row.tp), "--host", "127.0.0.1", "--port", "<port:engine>"]
        fixed += ["--config", "<path:engine-config>"]
        return Service(
            name="engine",
            argv=versioned(("tensorrt-llm=tensorrt-llm,tensorrt_llm", *distributions), (*fixed, *argv)),
            env={"PYTHONHASHSEED": "0", **env},
            environment=None,
            probe=Probe(port="engine", path="/health", deadline_s=7200.0),
        )

    def config_file(self, config: Mapping[str, Any]) -> ConfigFile | None:
        """Return the merged configuration, keys sorted so that equal settings give equal text."""
        return ConfigFile(path="engine-config", filename="trtllm.yaml", text=yaml.safe_dump(dict(config)))

    def versions(self, row: Row) -> tuple[VersionProbe, ...]:
        """The version is the tag of NVIDIA's release image."""
        return (version_probe("tensorrt-llm", "engine", released_version(row.image)),)

    def empties(self, argv: Argv) -> Emptying | None:
        """None: not tried here on a running server, so not claimed."""
        return None

    def metrics(self) -> tuple[tuple[str, str], ...]:
        """The Prometheus text; `/metrics` itself is a JSON list of iterations."""
        return (("engine", "/prometheus/metrics"),)
