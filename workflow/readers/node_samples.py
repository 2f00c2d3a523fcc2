"""Memory of the node, sampled once a second into `node.jsonl` while a replay runs."""

from pathlib import Path

import orjson

CLIENT = "client"
"""The replay client's own memory is not what the server and its sidecars take."""


def resident_max_bytes(path: Path) -> float | None:
    """Return the most that all services had resident at once, or None where there is no sample.

    Children are counted with their service. A page that two services share is counted for both. A line that was cut
    off, as by a full disk, is left out.
    """
    if not path.is_file():
        return None
    highest: float | None = None
    with path.open("rb") as stream:
        for line in stream:
            try:
                resident = orjson.loads(line)["rss_bytes"]
            except (orjson.JSONDecodeError, KeyError):
                continue
            taken = float(sum(size for name, size in resident.items() if name != CLIENT))
            highest = taken if highest is None else max(highest, taken)
    return highest
