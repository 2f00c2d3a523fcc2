"""AMD's ATOM server."""

from collections.abc import Mapping
from typing import Any

from workflow.engines.launching import version_probe, versioned
from workflow.matrix import Row
from workflow.serving import Argv, ConfigFile, Emptying, Env, Probe, Service, VersionProbe


class Atom:
    """`atom.entrypoints.openai_server`."""

    name = "atom"

    def service(self, row: Row, argv: Argv, env: Env, distributions: tuple[str, ...]) -> Service:
        """Return the engine's service. The API port is `--server-port`; `--port` is another one of ATOM's."""
        fixed = ["python3", "-u", "-m", "atom.entrypoints.openai_server", "--model", "<path:model>"]
        fixed += ["--served-model-name", row.model, "--host", "127.0.0.1", "--server-port", "<port:engine>"]
        fixed += ["--tensor-parallel-size", str(row.tp)]
        fixed += ["--enable-dp-attention"] if row.dp_attn else []
        fixed += ["--enable-expert-parallel"] if row.ep > 1 else []
        return Service(
            name="engine",
            argv=versioned(("atom=atom,amd-atom", *distributions), (*fixed, *argv)),
            env={"PYTHONHASHSEED": "0", **env},
            environment=None,
            probe=Probe(port="engine", path="/health", deadline_s=7200.0),
        )

    def config_file(self, config: Mapping[str, Any]) -> ConfigFile | None:
        """None: ATOM is configured by its argv."""
        return None

    def versions(self, row: Row) -> tuple[VersionProbe, ...]:
        """Images of ATOM are dated, so the version is recorded and not compared."""
        return (version_probe("atom", "engine", None),)

    def empties(self, argv: Argv) -> Emptying | None:
        """None: not tried here on a running server, so not claimed."""
        return None

    def metrics(self) -> tuple[tuple[str, str], ...]:
        """One endpoint."""
        return (("engine", "/metrics"),)
