"""Which points take turns on one server (`share_server: true`), and in which allocation. Pure but for its own files.

results/shared/<allocation>.json says what an allocation is for; it is written when a sweep is planned. The name counts
up once an allocation has begun, so that a rerun of the same points is never taken for the one before.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from workflow.allocation import limit_min, needed_s, turn_s
from workflow.config import Cluster
from workflow.contract import Document, InputError, digest
from workflow.points import Point

FOLDER = Path("shared")
"""Below results/."""


class Turns(Document):
    """`results/shared/<allocation>.json`: points that are measured one after the other on one server."""

    points: tuple[str, ...]
    """In the order they are measured."""
    tries: int
    """How often the allocation is made at most while points that are worth another try are missing."""


def turns_file(results: Path, allocation: str) -> Path:
    """Return the file that says what an allocation is for."""
    return results / FOLDER / f"{allocation}.json"


def check_emptied(points: Iterable[Point]) -> None:
    """Raise InputError for points whose server would hand what it cached for one to the next.

    All or nothing: an arm that shared a server and one that did not would differ by more than their backends.
    """
    stuck = {(p.row.framework, p.arm) for p in points if p.shared_server and p.plan.empties is None}
    if not stuck:
        return
    listed = ", ".join(f"{arm} on {framework}" for framework, arm in sorted(stuck))
    raise InputError(
        f"found true, but nothing is known to empty every cache of {listed} and to prove it short of a restart, so "
        "one point would be served from what another left behind",
        key="share_server",
        allowed="true for arms that docs/shared-server.md lists as shared, false for all others",
        do="set share_server to false, or choose entries without these arms",
    )


def allocations(points: Iterable[Point], clusters: Mapping[str, Cluster]) -> list[tuple[Point, ...]]:
    """Return the points that may share a server, together as many as the cluster's time limit allows.

    A point that is alone is left out: it is measured like any other.
    """
    by_server: dict[str, list[Point]] = {}
    for point in points:
        if point.shared_server:
            by_server.setdefault(point.server_key, []).append(point)
    found: list[list[Point]] = []
    for members in by_server.values():
        slurm = clusters[members[0].row.runner].slurm
        limit_s = limit_min(slurm) * 60.0 if slurm else float("inf")
        left_s = 0.0
        for point in sorted(members, key=lambda one: (one.concurrency, one.repeat)):
            if turn_s(point) > left_s:
                found.append([])
                left_s = limit_s - (needed_s(point, slurm) if slurm else 0.0)
            else:
                left_s -= turn_s(point)
            found[-1].append(point)
    return [tuple(members) for members in found if len(members) > 1]


def write_turns(groups: Iterable[tuple[Point, ...]], results: Path, tries: int) -> dict[str, Turns]:
    """Write the file of each allocation that is about to be made; return them by name."""
    written = {}
    for members in groups:
        turns = Turns(schema_version=Turns.SCHEMA_VERSION, points=tuple(point.id for point in members), tries=tries)
        key, number = digest(list(turns.points), 10), 1
        while (results / FOLDER / f"{key}-{number}").is_dir():
            number += 1
        name = f"{key}-{number}"
        turns.write(turns_file(results, name))
        written[name] = turns
    return written


def saved_s(members: Sequence[Point]) -> float:
    """Return the seconds of allocation that sharing is expected to save: all start-ups but one, less the emptying."""
    return sum(point.expected_s - turn_s(point) for point in members[1:])


def notice(groups: Sequence[Sequence[Point]]) -> str:
    """Return what sharing does to the bill, for whoever reads it before paying."""
    if not groups:
        return "share_server: no two of the missing points have one serve plan, so each gets a server of its own"
    points = sum(len(members) for members in groups)
    hours = sum(saved_s(members) * members[0].gpus for members in groups) / 3600
    return f"share_server: {points} points take turns on {len(groups)} servers, {hours:.2f} GPU-hours less than above"
