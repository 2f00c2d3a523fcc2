"""Folders that services write to while they run, a file tier's above all: no artefacts, and gone when an attempt ends.

Left in place, the tens of gigabytes of one attempt would fill the disk for the next. Whoever is killed leaves them; the
next attempt removes them if it can prove that their owner is dead: it holds a lock of the kernel on its folder, and the
folder says which kernel. A folder of another machine is never touched, since its lock may not be seen from here.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from workflow.config import Cluster
from workflow.serving import FILE_TIER, GB, GIB
from workflow.sharing import FOLDER

PREFIX = "offload-sweep-"
OWNER = ".owner"
"""Locked while the owner lives; holds the boot id of its kernel."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
RESERVE_BYTES = 8 * GIB
"""Free space from which on a file tier is stopped: some seconds of its writing (2.2 GB/s, vLLM 0.25.1 on one H200)."""


def folder_of(cluster: Cluster, folder: Path, attempt: str) -> Path:
    """Return where the services of an attempt write: on the node's own disk where the cluster names one."""
    return folder / "scratch" if cluster.scratch is None else Path(cluster.scratch) / f"{PREFIX}{attempt}"


def unusable(cluster: Cluster) -> str | None:
    """Say why this node cannot give what the cluster names as scratch, or None."""
    if cluster.scratch is None or os.access(cluster.scratch, os.W_OK | os.X_OK):
        return None
    found = "may not be written to" if Path(cluster.scratch).is_dir() else "is no folder"
    return f"scratch: {cluster.scratch} {found} on this node; make it there, or name another one in clusters.yaml"


@contextlib.contextmanager
def claimed(folder: Path, names: tuple[str, ...]) -> Iterator[None]:
    """Make the folders that a plan asks for, and hold them; nothing is made for a plan that asks for none."""
    if not names:
        yield
        return
    for name in names:
        (folder / name).mkdir(parents=True)
    with (folder / OWNER).open("w") as owner:
        with contextlib.suppress(OSError):  # a file system without locks: nobody then removes it but ourselves
            fcntl.flock(owner, fcntl.LOCK_EX)
            owner.write(BOOT_ID.read_text())
            owner.flush()
        yield


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


def empty(folder: Path, names: tuple[str, ...]) -> None:
    """Remove the files below some folders of it, also while a server goes on writing."""
    for name in names:
        for path in _files(folder / name):
            path.unlink(missing_ok=True)


def remove(folder: Path) -> list[str]:
    """Remove what services wrote, and say how much it was."""
    places = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    found = [f"removed scratch {place.name}: {_size(place)} bytes" for place in places]
    shutil.rmtree(folder, ignore_errors=True)
    return [*found, f"{folder} could not be removed"] if folder.exists() else found


def remove_dead(runs: Path, cluster: Cluster) -> list[str]:
    """Remove what killed attempts left, below these results and on this node's own disk, and say what it was."""
    places = [*runs.glob("*/*/scratch"), *(runs.parent / FOLDER).glob("*/*/server/scratch")]
    if cluster.scratch is not None:
        places += Path(cluster.scratch).glob(f"{PREFIX}*")
    found: list[str] = []
    for place in places:
        # Another attempt that starts now may remove it first, and a folder of another user cannot be opened.
        with contextlib.suppress(OSError), (place / OWNER).open("r+") as owner:
            if owner.read() != BOOT_ID.read_text():
                continue
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found += [f"{line}, left by a killed attempt in {place}" for line in remove(place)]
    return found


def _files(folder: Path) -> Iterator[Path]:
    # Not Path.rglob, which fails on a folder that somebody removes in the meantime.
    for root, _, names in os.walk(folder):
        yield from (Path(root) / name for name in names)


def _size(folder: Path) -> int:
    total = 0
    for path in _files(folder):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total
