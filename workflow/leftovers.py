"""Shared memory that a killed server leaves in /dev/shm, where it takes the node's memory until somebody removes it.

Only files that are known to be ours are removed: while an attempt runs, the files of /dev/shm that its processes have
open are written to its folder, with their inodes. What is left of them once no process has them open is removed, by
the attempt itself or, if it was killed, by the next one of the sweep on that node. Files of others are only reported.
"""

import json
import os
import socket
from collections.abc import Iterable
from pathlib import Path

import psutil

from workflow.contract import InputError, Strict, read_json, write_atomic

SHM = Path("/dev/shm")  # noqa: S108 - the place that is looked after, not a temporary file of ours
LEDGER = "shm.json"


class Held(Strict):
    """A file in /dev/shm that a process of an attempt had open."""

    name: str
    inode: int
    bytes: int


def used_bytes(shm: Path = SHM) -> int | None:
    """Return the bytes in use in /dev/shm, or None where there is none."""
    if not shm.is_dir():
        return None
    facts = os.statvfs(shm)
    return facts.f_frsize * (facts.f_blocks - facts.f_bfree)


def in_use(shm: Path = SHM) -> set[str]:
    """Return the names of files in /dev/shm that any process which may be looked at has open or mapped."""
    return {name for pid in psutil.pids() for name in _open_files(pid, shm)}


def _open_files(pid: int, shm: Path) -> set[str]:
    names: set[str] = set()
    folder = Path(f"/proc/{pid}")
    prefix = f"{shm}/"
    try:
        for line in (folder / "maps").read_text(errors="replace").splitlines():
            path = line.partition(prefix)[2]
            if path:
                names.add(path)
        for link in (folder / "fd").iterdir():
            target = str(link.readlink())
            if target.startswith(prefix):
                names.add(target.removeprefix(prefix))
    except OSError:
        return names  # it ended, or is another user's
    return {name for name in names if not name.endswith(" (deleted)")}


def note(folder: Path, members: Iterable[psutil.Process], shm: Path = SHM) -> None:
    """Add what an attempt's processes have open or mapped now to the ledger in its folder."""
    known = {held.name: held for held in _ledger(folder)}
    for name in {name for process in members for name in _open_files(process.pid, shm)}:
        try:
            facts = (shm / name).stat()
        except OSError:
            continue
        known[name] = Held(name=name, inode=facts.st_ino, bytes=facts.st_size)
    if known:
        data = {"host": socket.gethostname(), "files": [one.model_dump() for one in known.values()]}
        write_atomic(folder / LEDGER, json.dumps(data, indent=1).encode())


def _ledger(folder: Path) -> list[Held]:
    """Return what an attempt had open on this node."""
    try:
        data = read_json(folder / LEDGER)
    except InputError:
        return []
    return [Held.model_validate(one) for one in data["files"]] if data["host"] == socket.gethostname() else []


def remove(folders: Iterable[Path], shm: Path = SHM) -> list[str]:
    """Remove what attempts in these folders have left behind; return `name (bytes)` of each.

    A file that any process has open stays, and so does one with a noted name and another inode: it is another file.
    """
    listed = [held for folder in folders for held in _ledger(folder)]
    left = {held.name: held for held in listed if _inode(shm / held.name) == held.inode}
    if not left:
        return []
    used = in_use(shm)
    removed = []
    for name, held in left.items():
        if name not in used:
            (shm / name).unlink(missing_ok=True)
            removed.append(f"{name} ({held.bytes} bytes)")
    return removed


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None
