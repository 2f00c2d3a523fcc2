"""Inference engines, one file each: how one is started, when it is ready, which version answers.

To add one: write `<name>.py` with an object that fits `Engine`, and name it in `ENGINES`.
"""

from collections.abc import Mapping
from typing import Protocol

from workflow.engines.llamacpp import LlamaCpp
from workflow.matrix import Row
from workflow.serving import Argv, Env, Service, VersionProbe


class Engine(Protocol):
    """What the planner asks of an engine."""

    @property
    def name(self) -> str:
        """Return the `framework` of a search space."""
        ...

    def service(self, row: Row, argv: Argv, env: Env) -> Service:
        """Return the engine's service for a row, from the recipe's and the backend's arguments."""
        ...

    def versions(self, row: Row) -> tuple[VersionProbe, ...]:
        """Return how the engine's version is read back, and which one the row declares."""
        ...

    def metrics(self) -> tuple[tuple[str, str], ...]:
        """Return its Prometheus endpoints as (port, path)."""
        ...


ENGINES: Mapping[str, Engine] = {engine.name: engine for engine in (LlamaCpp(),)}
