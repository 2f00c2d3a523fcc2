"""llama.cpp's own HTTP server, embedded through the xllamacpp wheel."""

from collections.abc import Mapping
from typing import Any

from workflow.matrix import Row
from workflow.serving import Argv, ConfigFile, Emptying, Env, Probe, Service, VersionProbe, flags_of


class LlamaCpp:
    """Runs `llamacpp_server.py` beside this file, in the `llamacpp` environment."""

    name = "llamacpp"

    def service(self, row: Row, argv: Argv, env: Env, distributions: tuple[str, ...]) -> Service:
        """Return the engine's service; `argv` are llama-server's own flags. It prints its version by itself."""
        fixed = ("--model", "<path:model>", "--alias", row.model, "--host", "127.0.0.1", "--port", "<port:engine>")
        return Service(
            name="engine",
            # -I: the folder of the script must not shadow packages of the environment.
            argv=("python", "-I", "<path:project>/workflow/engines/llamacpp_server.py", *fixed, *argv),
            env=env,
            environment="llamacpp",
            probe=Probe(port="engine", path="/health", deadline_s=60.0),
        )

    def config_file(self, config: Mapping[str, Any]) -> ConfigFile | None:
        """None: llama-server is configured by its argv."""
        return None

    def versions(self, row: Row) -> tuple[VersionProbe, ...]:
        """The version is the tag of the search space's image, `xllamacpp:<version>`."""
        pattern = r"^serving with xllamacpp (?P<version>\S+)"
        declared = row.image.rpartition(":")[2] or None
        return (VersionProbe(component="xllamacpp", service="engine", pattern=pattern, declared=declared),)

    def empties(self, argv: Argv) -> Emptying | None:
        """Each slot is erased by itself."""
        slots = int(flags_of(argv)["--parallel"][0])
        return Emptying(posts=tuple(("engine", f"/slots/{slot}?action=erase") for slot in range(slots)))

    def metrics(self) -> tuple[tuple[str, str], ...]:
        """One endpoint, on the port of the API."""
        return (("engine", "/metrics"),)
