"""What only the replay client's own log says: how many traces it loaded, how many requests it sent."""

import re
from dataclasses import dataclass
from pathlib import Path

_TRACES = re.compile(r"built \d+ trajectories from (\d+) traces")
_SENT = re.compile(r"Phase \S+ \(profiling\) sending complete \| sent=(\d+)")
_CANCELLED = re.compile(r"Phase \S+ \(profiling\) complete \| .*?cancelled=(\d+)")


@dataclass
class ClientLog:
    """Counts over the profiling phases; None where the log does not say, as where the client was killed before."""

    traces: int | None = None
    sent: int | None = None
    """Requests that were sent, whatever became of them."""
    cancelled: int | None = None
    """Requests that the client itself ended when a phase's time was over."""


def read_client_log(path: Path) -> ClientLog:
    """Read aiperf's log line by line; without the file nothing is known."""
    log = ClientLog()
    if not path.is_file():
        return log
    with path.open(errors="replace") as stream:
        for line in stream:
            if log.traces is None and (found := _TRACES.search(line)):
                log.traces = int(found[1])
            elif found := _SENT.search(line):
                log.sent = (log.sent or 0) + int(found[1])
            elif found := _CANCELLED.search(line):
                log.cancelled = (log.cancelled or 0) + int(found[1])
    return log
