"""Results of jobs that an earlier head process submitted: waited for and taken over, never measured twice.

A head process that is killed leaves its jobs running. The next one finds them here, by Slurm's queue and by the leases
of points, and puts this module in the place of `workflow.runs` for their points.
"""

import argparse
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType

import psutil

from workflow import jobs
from workflow.contract import InputError
from workflow.jobs import Job
from workflow.lease import live_lease
from workflow.points import Point
from workflow.processes import wait_until
from workflow.runs import Run

POLL_S = 5.0
SETTLE_S = 15.0
"""How long a result may take to be seen here after its job has ended on another node."""


def live_holders(points: Iterable[str], queued: Iterable[Job], runs: Path) -> dict[str, tuple[str, ...]]:
    """Return point -> prefixes of the attempts that measure it now or will: `job<id>-`, or the name in a live lease."""
    wanted = set(points)
    found: dict[str, set[str]] = {}
    for job in queued:
        # A job whose points take turns goes on after it has measured one.
        through = job.allocation is not None and any((runs / job.point).glob(f"job{job.id}-*/run.json"))
        if job.live and job.point in wanted and not through:
            found.setdefault(job.point, set()).add(f"job{job.id}-")
    for lease in runs.glob("*/lease.json"):
        point = lease.parent.name
        if (
            point in wanted
            and point not in found
            and (held := live_lease(lease.parent)) is not None
            and not held.stopping
        ):
            found[point] = {held.attempt}
    return {point: tuple(sorted(prefixes)) for point, prefixes in found.items()}


def result_of(out: Path, holders: Iterable[str], point: str) -> Run | None:
    """Return the newest finished measurement among the attempts of these holders, or None."""
    runs = []
    for prefix in holders:
        for path in out.glob(f"{prefix}*/run.json"):
            run = Run.read(path)
            if run.point == point:
                runs.append(run)
    return max(runs, key=lambda run: run.started_unix_s, default=None)


def adopt(
    point: str, out: Path, holders: tuple[str, ...], *, alive: Callable[[], bool], say: Callable[[str], None]
) -> int:
    """Wait until the holders have ended and publish their result; return an exit code.

    Not measured here if there is none: this runs beside Snakemake, not on a node of the point's cluster.
    """
    say(f"waiting for {', '.join(holders)} of an earlier run")
    while alive():
        time.sleep(POLL_S)
    wait_until(lambda: result_of(out, holders, point) is not None, SETTLE_S)
    run = result_of(out, holders, point)
    if run is None:
        say(f"{', '.join(holders)} left no result; the next `snakemake` measures the point")
        return 1
    run.write(out / "run.json")
    say(f"took over the result of {run.attempt}")
    return 0


def lock_advice(folder: Path) -> str | None:
    """Return what to do about a lock of Snakemake that nobody holds any more, or None.

    Snakemake's lock files do not say whose they are, so the processes of this machine are looked at.
    """
    locks = folder / ".snakemake/locks"
    if not locks.is_dir() or not any(locks.iterdir()):
        return None
    heads = [str(process.pid) for process in _heads(folder)]
    if heads:
        return f"Another snakemake works here on {socket.gethostname()}: pid {', '.join(heads)}"
    return (
        f"The working directory is locked, and no snakemake works here on {socket.gethostname()}. If none does on "
        "another machine either, the last one was killed: run `snakemake --unlock`, then the same command as before. "
        "Jobs that it submitted go on; their results are waited for and taken over."
    )


def _heads(folder: Path) -> list[psutil.Process]:
    """Return the other processes of Snakemake in this folder; those inside of jobs run without a lock."""
    found = []
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            if process.pid in own or Path(process.cwd()) != folder.resolve():
                continue
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # it ended, or is another user's
        if any(Path(word).name == "snakemake" for word in words[:3]) and "--nolock" not in words:
            found.append(process)
    return found


def _job_ids(holders: Iterable[str]) -> list[str]:
    return [name.removeprefix("job").split("-", 1)[0] for name in holders if name.startswith("job")]


def main() -> int:
    """Take over a point from the attempts of `--holders`; the other arguments are those of `workflow.runs`."""
    parser = argparse.ArgumentParser(prog="python -m workflow.adoption", description="Take over a running point.")
    parser.add_argument("--holders", required=True, help="prefixes of attempts, separated by commas")
    parser.add_argument("point", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--try", type=int, default=1, dest="tries")
    parser.add_argument("--log", type=Path)
    parser.add_argument("--clusters", type=Path, help="not used: the job that measures knows its cluster")
    parser.add_argument("--stop-with-parent", action="store_true")
    arguments = parser.parse_args()
    holders = tuple(arguments.holders.split(","))
    parent = os.getppid()

    def say(text: str) -> None:
        print(f"[{time.strftime('%H:%M:%S')}] {arguments.point.stem}: {text}", file=sys.stderr, flush=True)

    def alive() -> bool:
        if arguments.stop_with_parent and os.getppid() != parent:
            sys.exit(1)  # nobody waits any more; the job itself goes on
        try:
            queued = jobs.queue(Path.cwd())
        except InputError:
            return True  # a controller that does not answer for an hour has not ended the job
        return arguments.point.stem in live_holders([arguments.point.stem], queued, arguments.out.parent)

    def stopped(_number: int, _frame: FrameType | None) -> None:
        # Ctrl-C ends the sweep; its jobs are ended by their ids, whichever of its head processes submitted them.
        if ids := _job_ids(holders):
            jobs.ask(["scancel", *ids])
        sys.exit(130)

    signal.signal(signal.SIGINT, stopped)
    try:
        return adopt(Point.read(arguments.point).id, arguments.out, holders, alive=alive, say=say)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
