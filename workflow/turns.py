"""Points in turn on one server: `python -m workflow.turns`, the job of the rule `run_shared`.

Each point keeps an attempt, a lease, a log, a failure record and a run.json of its own, published the moment it is
measured. Between two points the server is told to empty its caches and has to prove that it did. A server that dies, or
stays warm, fails the points that were not measured yet and no other.
"""

import argparse
import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from workflow import endpoints, integrity, scratch
from workflow.attempt import Attempt
from workflow.config import Cluster
from workflow.contract import Document, InputError
from workflow.failures import AttemptFailed, FailureClass
from workflow.images import cluster_of, find_image
from workflow.lease import lease
from workflow.parts import find_parts
from workflow.points import Point
from workflow.runs import (
    Failed,
    Rounds,
    Run,
    SharedServer,
    attempt_name,
    blame_memory,
    describe,
    how_it_failed,
    interruptible,
    launcher_for,
    observe,
    publish,
    record_failure,
    remove_left_behind,
    served,
)
from workflow.serving import Emptying
from workflow.sharing import FOLDER, Turns, turns_file

EMPTYING_TRIES = 5
"""An engine leaves its caches as they are, and answers 200, while a copy to a tier is still under way."""
SETTLE_S = 1.0
"""Pause before each."""
COLD_SHARE = 0.05
"""Largest cached share of a probe prompt on a cold server: the chat template's first tokens are the same in each."""
HOT_SHARE = 0.5
"""Smallest cached share of a prompt that was asked a moment ago: a server that never says so proves nothing."""


class Outcome(Document):
    """`results/shared/<allocation>.done.json`: what became of each point; kept beside it after every turn."""

    measured: dict[str, str]
    """Point -> attempt."""
    failed: dict[str, str]
    """Point -> `class: message`."""
    given_up: tuple[str, ...]
    """Those of `failed` that are not worth another try."""


@dataclass
class Shared:
    """The server that the points take turns on."""

    host: Attempt
    """The attempt that started it; its folder is the allocation's."""
    warnings: tuple[str, ...]
    fresh: dict[str, int] = field(default_factory=dict)
    """Service -> bytes of its log once it was ready: what every point has in common."""
    points_before: int = 0


# ------------------------------------------------------------------------------------------------------ the cold
def make_cold(attempt: Attempt) -> str:
    """Empty the server's caches, prove that they are empty, and return what showed it; raises AttemptFailed.

    The proof can fail: the prompts are first seen to be cached, then asked again, newest first, since a cache that was
    left alone has at least kept the newest.
    """
    texts = tuple(reversed(integrity.prompts()))
    hot = [_cached_shares(attempt, (text, text))[1] for text in reversed(texts)]
    if min(hot) < HOT_SHARE:
        raise AttemptFailed(
            FailureClass.ENGINE_NOT_READY,
            f"the server reports {min(hot):.0%} of a prompt as cached that it was asked a moment ago, so it cannot be "
            "shown to be cold for the next point",
        )
    for _ in range(EMPTYING_TRIES):
        _empty(attempt)
        cold = _cached_shares(attempt, texts)
        if max(cold) <= COLD_SHARE:
            break
    else:
        raise AttemptFailed(
            FailureClass.ENGINE_NOT_READY,
            f"the server still has {max(cold):.0%} of a prompt cached after it was told {EMPTYING_TRIES} times "
            "to empty its caches",
        )
    _empty(attempt)  # of the proof itself: see still_cold
    return f"at least {min(hot):.0%} of each probe prompt was cached before emptying, at most {max(cold):.0%} after it"


def still_cold(rounds: Rounds) -> None:
    """Raise AttemptFailed if the server had cached what the proof asked: the last emptying was not heeded.

    The point's own first questions show it, which are the same prompts.
    """
    computed, _ = rounds
    shares = [(one.cached_tokens or 0) / one.prompt_tokens for one in computed if one.prompt_tokens]
    cached = max(shares, default=0.0)
    if cached > COLD_SHARE:
        raise AttemptFailed(
            FailureClass.ENGINE_NOT_READY, f"the server still has {cached:.0%} of a prompt cached that its proof asked"
        )


def _empty(attempt: Attempt) -> None:
    emptying = attempt.point.plan.empties or Emptying()
    time.sleep(SETTLE_S)
    for port, path in emptying.posts:
        for _ in range(EMPTYING_TRIES):
            if (wrong := endpoints.tell(attempt.url(port, path))) is None:
                break
            # A server refuses while blocks are still being copied.
            time.sleep(SETTLE_S)
        else:
            raise AttemptFailed(FailureClass.ENGINE_NOT_READY, f"the server did not empty its caches: {path}: {wrong}")
    scratch.empty(attempt.scratch, emptying.folders)


def _cached_shares(attempt: Attempt, texts: tuple[str, ...]) -> list[float]:
    shares = []
    for text in texts:
        answer = integrity.ask_one(attempt, text)
        if isinstance(answer, str):
            raise AttemptFailed(
                FailureClass.ENGINE_NOT_READY, f"the server cannot be asked what it has cached: {answer}"
            )
        if answer.cached_tokens is None or not answer.prompt_tokens:
            raise AttemptFailed(
                FailureClass.ENGINE_NOT_READY, "the server does not say how much of a prompt was cached"
            )
        shares.append(answer.cached_tokens / answer.prompt_tokens)
    return shares


# ------------------------------------------------------------------------------------------------------ one turn
def take_turn(attempt: Attempt, shared: Shared, allocation: str) -> Run:
    """Measure one point on the server; raises AttemptFailed. Its folder then holds its own part of each log."""
    host, started = shared.host, time.time()
    attempt.folder.mkdir(parents=True)
    shutil.copy2(host.folder / "node.json", attempt.folder / "node.json")
    attempt.ports, attempt.running, attempt.started = host.ports, host.running, host.started
    attempt.guard, attempt.sessions, attempt.logs = host.guard, host.sessions, host.folder
    attempt.scratch = host.scratch
    begins = dict(shared.fresh)
    try:
        cold = "it was fresh"
        attempt.check_alive()
        if shared.points_before:
            with attempt.phase("empty"):
                cold = make_cold(attempt)
            begins = {name: host.log_of(name).stat().st_size for name in shared.fresh}
        attempt.probe_spans = {name: [(shared.fresh[name], begin)] for name, begin in begins.items()}
        with blame_memory():
            seen = observe(attempt, still_cold)
    finally:
        _cut_logs(attempt, shared, begins)
    about = SharedServer(allocation=allocation, points_before=shared.points_before, cold=cold)
    return describe(attempt, started, host.phases_s["serve"], seen, shared.warnings, shared=about)


def _cut_logs(attempt: Attempt, shared: Shared, begins: dict[str, int]) -> None:
    """Give the attempt its own logs: how the server started, and what it said in this turn."""
    for name, fresh in shared.fresh.items():
        data = shared.host.log_of(name).read_bytes()
        (attempt.folder / f"{name}.log").write_bytes(data[:fresh] + data[begins[name] :])
        if spans := attempt.probe_spans.get(name):
            gap = begins[name] - fresh
            attempt.probe_spans[name] = [(begin - gap, end - gap) for begin, end in spans[1:]]
    attempt.logs = None


# ------------------------------------------------------------------------------------------------ the allocation
@dataclass
class Allocation:
    """One job: its points, where it writes, and what became of them so far."""

    name: str
    """Of the allocation."""
    attempt: str
    """Name of this job's attempts, the same in each point's folder."""
    points: tuple[Point, ...]
    results: Path
    environments: Path
    cluster: Cluster
    parent: int | None
    log: Path | None
    outcome: Outcome
    stopping: threading.Event = field(default_factory=threading.Event)
    leases: dict[str, contextlib.ExitStack] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Return where the server's own files go."""
        return (self.results / FOLDER / self.name / self.attempt).resolve()

    @property
    def missing(self) -> tuple[Point, ...]:
        """Return the points that are still to be measured, in order."""
        settled = {*self.outcome.measured, *self.outcome.given_up}
        return tuple(point for point in self.points if point.id not in settled)

    def out(self, point: Point) -> Path:
        """Return the folder of a point's runs."""
        return self.results / "runs" / point.id

    def attempt_at(self, point: Point, folder: Path, log: Path | None) -> Attempt:
        """Return a new attempt at a point; services see the allocation's folder."""
        parts = find_parts(point, self.results, self.environments, self.cluster.model_paths)
        image = find_image(self.cluster, point.row.image, self.results)
        launcher = launcher_for(point, self.cluster, image, parts, self.folder, self.attempt)
        return Attempt(point, self.attempt, folder, parts, launcher, self.parent, self.stopping, log)

    def settle(self, point: Point, failure: Failed | None) -> None:
        """Keep what became of a point and let go of it."""
        measured, failed, given_up = dict(self.outcome.measured), dict(self.outcome.failed), self.outcome.given_up
        if failure is None:
            measured[point.id] = self.attempt
            failed.pop(point.id, None)
        else:
            folder = self.out(point).resolve() / self.attempt
            record = record_failure(point, self.attempt, folder, self.results / "failures", failure)
            failed[point.id] = f"{record.failure_class}: {failure.message}"
            given_up += () if record.worth_retrying else (point.id,)
        self.outcome = Outcome(
            schema_version=Outcome.SCHEMA_VERSION, measured=measured, failed=failed, given_up=given_up
        )
        self.outcome.write(self.results / FOLDER / self.name / "outcome.json")
        if (held := self.leases.pop(point.id, None)) is not None:
            held.close()


def measure_all(allocation: Allocation) -> int:
    """Measure the points that are missing, each on its own account; return the exit code."""
    allocation.folder.mkdir(parents=True)
    with interruptible(allocation.stopping), _holding(allocation):
        todo = [point for point in allocation.missing if point.id in allocation.leases]
        if not todo:
            return 0
        remove_left_behind(allocation.results / "runs", allocation.cluster, allocation.attempt)
        left = list(todo)
        try:
            host = allocation.attempt_at(todo[0], allocation.folder / "server", allocation.log)
            left_behind: list[str] = []
            with served(host, left_behind) as warnings:
                fresh = {one.name: host.log_of(one.name).stat().st_size for one in host.point.plan.services}
                shared = Shared(host, warnings, fresh)
                for point in todo:
                    _one(allocation, shared, point)
                    left.remove(point)
        except Exception as error:
            # The server, not a point: what was measured stays, what was not has failed.
            failure = how_it_failed(error, allocation.folder)
            for point in left:
                allocation.settle(point, failure)
            if failure.defect:
                raise
            return failure.exit_code
    return 0


def _one(allocation: Allocation, shared: Shared, point: Point) -> None:
    """Take a turn; raises what ended the server, while a failure of the point alone is settled here."""
    log = allocation.results / "logs/runs" / f"{point.id}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    out = allocation.out(point)
    attempt = allocation.attempt_at(point, out.resolve() / allocation.attempt, log)
    try:
        finished = take_turn(attempt, shared, allocation.name)
        publish(finished, attempt, out)
    except AttemptFailed as error:
        if error.failure_class not in OF_THE_POINT:
            raise
        allocation.settle(point, how_it_failed(error, out))
    else:
        allocation.settle(point, None)
    shared.points_before += 1


OF_THE_POINT = frozenset({FailureClass.CLIENT_FAILED, FailureClass.OUT_OF_TIME, FailureClass.SCRATCH_FULL})
"""What the client did, or its sessions asked for; the server lives and has to prove that it is cold before the next
point, its files removed."""


@contextlib.contextmanager
def _holding(allocation: Allocation) -> Iterator[None]:
    """Hold every missing point; one that another job measures is left to it."""
    stopping = []
    try:
        for point in allocation.missing:
            stack = contextlib.ExitStack()
            try:
                stopping.append(stack.enter_context(lease(allocation.out(point), allocation.attempt)))
                allocation.leases[point.id] = stack
            except AttemptFailed as error:
                allocation.settle(point, Failed(error.failure_class, error.message))
        yield
    finally:
        for event in stopping:
            event.set()
        for held in allocation.leases.values():
            held.close()


def publish_result(point: Point, out: Path, done: Path) -> int:
    """Make OUT/run.json what the allocation measured; return an exit code."""
    outcome = Outcome.read(done)
    if point.id not in outcome.measured:
        why = outcome.failed.get(point.id, "it was not measured")
        print(f"{point.id}: {why}; the next `snakemake` measures it", file=sys.stderr)
        return 1
    Run.read(out / outcome.measured[point.id] / "run.json").write(out / "run.json")
    return 0


def main() -> int:
    """Measure the points of an allocation; with --publish, take one point's result over."""
    parser = argparse.ArgumentParser(prog="python -m workflow.turns", description="Measure points on one server.")
    parser.add_argument("file", type=Path, help="results/shared/<allocation>.json, or a point file with --publish")
    parser.add_argument("out", type=Path, help="file to write when all is settled, or the point's folder of runs")
    parser.add_argument("--publish", type=Path, metavar="DONE", help="take over what this allocation measured")
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--environments", type=Path, default=Path(".envs"))
    parser.add_argument("--clusters", type=Path, default=Path("configs/clusters.yaml"))
    parser.add_argument("--try", type=int, default=1, dest="tries")
    parser.add_argument("--log", type=Path)
    parser.add_argument("--stop-with-parent", action="store_true")
    arguments = parser.parse_args()
    parent = os.getppid() if arguments.stop_with_parent else None
    try:
        if arguments.publish is not None:
            return publish_result(Point.read(arguments.file), arguments.out, arguments.publish)
        return _main(arguments, parent)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2


def _main(arguments: argparse.Namespace, parent: int | None) -> int:
    results: Path = arguments.results
    name = arguments.file.stem
    turns = Turns.read(turns_file(results, name))
    points = tuple(Point.read(results / "points" / f"{point}.json") for point in turns.points)
    kept = results / FOLDER / name / "outcome.json"
    outcome = (
        Outcome.read(kept)
        if kept.exists()
        else Outcome(schema_version=Outcome.SCHEMA_VERSION, measured={}, failed={}, given_up=())
    )
    allocation = Allocation(
        name,
        attempt_name(),
        points,
        results,
        arguments.environments,
        cluster_of(points[0], arguments.clusters),
        parent,
        arguments.log,
        outcome,
    )
    code = measure_all(allocation)
    again = set(allocation.outcome.failed) - set(allocation.outcome.given_up)
    # Snakemake's own retry makes the allocation again for what is worth it; the last one leaves each point to its own
    # rule, which fails for itself.
    if code > 1 or (again and arguments.tries < turns.tries):
        return code or 1
    allocation.outcome.write(arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
