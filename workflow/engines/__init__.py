"""Inference engines, one file each: how one is started, when it is ready, which version answers.

To add one: write `<name>.py` with an object that fits `Engine`, and name it in `ENGINES`.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from workflow.engines.atom import Atom
from workflow.engines.llamacpp import LlamaCpp
from workflow.engines.sglang import SGLang
from workflow.engines.trtllm import TrtLlm
from workflow.engines.vllm import Vllm
from workflow.matrix import Row
from workflow.serving import Argv, ConfigFile, Emptying, Env, Service, VersionProbe


class Engine(Protocol):
    """What the planner asks of an engine."""

    @property
    def name(self) -> str:
        """Return the `framework` of a search space."""
        ...

    def service(self, row: Row, argv: Argv, env: Env, distributions: tuple[str, ...]) -> Service:
        """Return the engine's service for a row, from the recipe's and the backend's arguments.

        `distributions` are those whose versions the process prints before it serves, for the backend's version probes.
        """
        ...

    def config_file(self, config: Mapping[str, Any]) -> ConfigFile | None:
        """Return the engine's configuration file, or None for an engine that is configured by its argv alone."""
        ...

    def versions(self, row: Row) -> tuple[VersionProbe, ...]:
        """Return how the engine's version is read back, and which one the row declares."""
        ...

    def empties(self, argv: Argv) -> Emptying | None:
        """Return what empties the device's KV cache short of a restart; None if nothing is proven to."""
        ...

    def metrics(self) -> tuple[tuple[str, str], ...]:
        """Return its Prometheus endpoints as (port, path)."""
        ...


ENGINES: Mapping[str, Engine] = {engine.name: engine for engine in (Vllm(), SGLang(), TrtLlm(), Atom(), LlamaCpp())}
