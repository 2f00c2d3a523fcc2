"""Folders that services write to while they run, a file tier's above all: no artefacts, and gone when an attempt ends.

Left in place, the tens of gigabytes of one attempt would fill the disk for the next.
"""

import os
import shutil
from pathlib import Path

from workflow.config import Cluster
from workflow.contract import digest
from workflow.lease import live_attempts
from workflow.serving import FILE_TIER, GB, GIB
from workflow.sharing import FOLDER

PROJECT = Path(__file__).resolve().parents[1]
RESERVE_BYTES = 2 * GIB
"""Free space from which on a file tier is stopped: logs and records of this attempt, and of others, need some."""


def folder_of(cluster: Cluster, folder: Path, attempt: str) -> Path:
    """Return where the services of an attempt write: on the node's own disk where the cluster names one."""
    return folder / "scratch" if cluster.scratch is None else Path(cluster.scratch) / f"{_prefix()}{attempt}"


def unusable(cluster: Cluster) -> str | None:
    """Say why this node cannot give what the cluster names as scratch, or None."""
    if cluster.scratch is None or os.access(cluster.scratch, os.W_OK | os.X_OK):
        return None
    found = "may not be written to" if Path(cluster.scratch).is_dir() else "is no folder"
    return f"scratch: {cluster.scratch} {found} on this node; make it there, or name another one in clusters.yaml"


def make(folder: Path, names: tuple[str, ...]) -> None:
    """Make the folders that a plan asks for."""
    for name in names:
        (folder / name).mkdir(parents=True)


def full(folder: Path, names: tuple[str, ...]) -> str | None:
    """Say that a file tier leaves too little of its disk, or None. Engines set no limit, and go on without storing."""
    if FILE_TIER not in names:
        return None
    free = shutil.disk_usage(folder).free
    if free >= RESERVE_BYTES:
        return None
    written = _size(folder / FILE_TIER)
    return (
        f"the file tier has written {written / GB:.1f} GB to {folder}, which leaves {free / GB:.1f} GB of that disk; "
        "it has no limit of its own: name a larger disk as the cluster's `scratch`, or ask for fewer sessions"
    )


def remove(folder: Path) -> list[str]:
    """Remove what services wrote, and say how much it was."""
    found = []
    for place in sorted(folder.iterdir()) if folder.is_dir() else ():
        found.append(f"removed scratch {place.name}: {_size(place)} bytes")
    shutil.rmtree(folder, ignore_errors=True)
    return [*found, f"{folder} could not be removed"] if folder.exists() else found


def left_behind(runs: Path, cluster: Cluster, attempt: str) -> list[Path]:
    """Return the folders of killed attempts of this checkout, below its results and on this node's own disk.

    An attempt is killed if no lease below `runs` says that it measures now, and it is not `attempt` itself.
    """
    found = {place: place.parent.name for place in runs.glob("*/*/scratch")}
    found |= {place: place.parents[1].name for place in (runs.parent / FOLDER).glob("*/*/server/scratch")}
    if cluster.scratch is not None:
        own = Path(cluster.scratch).glob(f"{_prefix()}*")
        found |= {place: place.name.removeprefix(_prefix()) for place in own}
    if not found:
        return []
    live = {attempt, *live_attempts(runs)}
    return [place for place, name in found.items() if name not in live]


def _prefix() -> str:
    # Several checkouts may share a disk, and none knows which attempts of another are alive.
    return f"offload-sweep-{digest(str(PROJECT), 8)}-"


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue  # the engine removed it in the meantime
    return total
