"""Who measures a point now: one holder at a time, also over a network file system, and none that is dead."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from workflow import processes
from workflow.contract import Strict, write_atomic
from workflow.failures import AttemptFailed, FailureClass

BEAT_S = 5.0
LEASE_EXPIRES_S = 60.0
"""A lease of another host counts as left behind when it has not been renewed for this long."""
WAIT_FOR_STOPPING_S = 30.0


class Lease(Strict):
    """Who is measuring a point right now."""

    attempt: str
    host: str
    pid: int
    born: str
    """Boot and clock tick at which the process started: a pid alone is reused, and a wall clock may jump."""
    stopping: bool


@contextlib.contextmanager
def lease(out: Path, attempt: str) -> Iterator[threading.Event]:
    """Hold a point while it is measured; setting the yielded event marks the holder as stopping.

    Raises AttemptFailed(already_running) while another job holds it. A holder that is stopping is waited for, since
    a rerun after Ctrl-C comes faster than a server ends.
    """
    path = out / "lease.json"
    out.mkdir(parents=True, exist_ok=True)
    _wait_for_stopping(path)
    stopping, done = threading.Event(), threading.Event()
    mine = Lease(
        attempt=attempt,
        host=socket.gethostname(),
        pid=os.getpid(),
        born=_born(os.getpid()) or "",
        stopping=False,
    )
    _take(path, mine)

    def beat() -> None:
        said, since = False, 0.0
        while not done.wait(0.2):
            since += 0.2
            # A full disk or a server that is away for a while must not end the beat for good.
            with contextlib.suppress(OSError):
                if stopping.is_set() and not said:
                    _write_lease(path, mine, stopping=True)
                    said = True
                elif since >= BEAT_S:
                    os.utime(path)
                    since = 0.0

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield stopping
    finally:
        done.set()
        thread.join()
        path.unlink(missing_ok=True)


def _write_lease(path: Path, mine: Lease, *, stopping: bool) -> None:
    write_atomic(path, mine.model_copy(update={"stopping": stopping}).model_dump_json().encode())


def _take(path: Path, mine: Lease) -> None:
    own = path.with_name(f".{path.name}.{mine.attempt}")
    own.write_text(mine.model_dump_json())
    try:
        for _ in range(2):
            try:
                os.link(own, path)  # fails if the lease exists, also on a network file system
                return
            except FileExistsError:
                holder = _holder(path, own.stat().st_mtime)
                if holder is not None:
                    raise AttemptFailed(
                        FailureClass.ALREADY_RUNNING,
                        f"attempt {holder.attempt} (pid {holder.pid} on {holder.host}) is measuring this point",
                    ) from None
                # Only one of several jobs that find it left behind gets to remove it.
                with contextlib.suppress(FileNotFoundError):
                    path.rename(own.with_suffix(".left-behind"))
                    own.with_suffix(".left-behind").unlink()
        raise AttemptFailed(FailureClass.ALREADY_RUNNING, "another job took this point a moment ago")
    finally:
        own.unlink(missing_ok=True)


def _holder(path: Path, now_unix_s: float | None = None) -> Lease | None:
    """Return the live holder of a lease, or None if it was left behind.

    `now_unix_s` is the time on the file system's own clock where that is known: another node's may differ by minutes.
    """
    try:
        found = Lease.model_validate_json(path.read_bytes())
        age_s = (time.time() if now_unix_s is None else now_unix_s) - path.stat().st_mtime
    except (FileNotFoundError, ValueError):
        return None
    if found.host != socket.gethostname():
        return found if age_s < LEASE_EXPIRES_S else None
    return found if _born(found.pid) == found.born else None


def _born(pid: int) -> str | None:
    """Return the boot and the clock tick at which a process started, or None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *rest = stat.rpartition(")")[2].split()  # the command before it may hold blanks and brackets
    return None if state in ("Z", "X") else f"{boot}:{rest[18]}"


def live_lease(out: Path) -> Lease | None:
    """Return the lease of the attempt that holds a point now, or None."""
    return _holder(out / "lease.json")


def _wait_for_stopping(path: Path) -> None:
    def gone() -> bool:
        holder = _holder(path)
        return holder is None or not holder.stopping

    processes.wait_until(gone, deadline_s=WAIT_FOR_STOPPING_S)
