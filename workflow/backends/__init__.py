"""KV-cache offload backends, one file each: what a contender adds to a serve command, forbids, pins and proves.

To add one: write `<name>.py` with an object that fits `Backend`, and name it in `BACKENDS`.
"""

from collections.abc import Mapping
from typing import Protocol

from workflow.backends.llamacpp_ram import LlamaCppRam
from workflow.backends.none import NoOffload
from workflow.matrix import Row
from workflow.serving import Arm


class Backend(Protocol):
    """What the planner asks of a backend."""

    @property
    def name(self) -> str:
        """Return the `kv-offload-backend.name` of a search space; `none` is the control."""
        ...

    @property
    def engines(self) -> tuple[str, ...]:
        """Return the engines it is implemented for."""
        ...

    def arm(self, row: Row) -> Arm:
        """Return what the backend changes for one row; pure."""
        ...


BACKENDS: Mapping[str, Backend] = {backend.name: backend for backend in (NoOffload(), LlamaCppRam())}
