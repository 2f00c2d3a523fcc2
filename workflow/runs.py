"""One point on one node, from claim to publish: serve the model, replay the sessions, keep everything.

`python -m workflow.runs POINT OUT` is what the rule `run_point` calls and what a person can call by hand. Each attempt
writes to a folder of its own, OUT/<attempt>/; OUT/run.json is written last, after every artefact was read back, so
that a job which is killed at any moment leaves nothing that a later run takes for a result.
"""

import argparse
import contextlib
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

from workflow import endpoints, integrity, leftovers, processes, replay, scratch, startup, watch
from workflow.attempt import PROJECT, STOP_GRACE_S, Attempt, Interrupted, StartedService
from workflow.config import Cluster
from workflow.contract import Document, Finding, InputError, Strict, file_sha256, write_atomic
from workflow.failures import (
    WORTH_RETRYING,
    AttemptFailed,
    Failure,
    FailureClass,
    diagnose,
    last_failure,
)
from workflow.images import Image, cluster_of, find_image
from workflow.launchers import Command, Launcher
from workflow.lease import lease, live_lease
from workflow.node import oom_kills
from workflow.parts import Parts, find_parts
from workflow.points import Point
from workflow.processes import Guard, Managed
from workflow.serving import Situation

SUMMARY_S = 120.0
"""How long the client may take to prepare its dataset and to write its summary, beside warm-up, window and drain."""
NOTE_SHM_S = 30.0
GPU_SETTLES_S = 30.0
"""Drivers give a killed process's memory back after a while."""


class Artefact(Strict):
    """A file of the attempt, as it was read back before the run was published."""

    path: str
    """Relative to the attempt's folder."""
    bytes: int
    sha256: str


class Host(Strict):
    """The node that measured."""

    name: str
    cpu: str
    cores: int
    memory_bytes: int
    kernel: str
    python: str


class SharedServer(Strict):
    """The server of a point that shared one (`share_server: true`)."""

    allocation: str
    """Name of the allocation, results/shared/<allocation>.json: which points it was for."""
    points_before: int
    """Points that this server had served before; 0: it was fresh."""
    cold: str
    """What showed that nothing of them was cached any more."""


class Run(Document):
    """A finished measurement. It says what ran and was observed; workflow/metrics.py judges the numbers."""

    point: str
    attempt: str
    started_unix_s: float
    phases_s: dict[str, float]
    """Seconds that each phase took, in order: serve, replay, stop."""
    startup_s: float
    """From the start of the first service until the probe request was answered."""
    versions: dict[str, str | None]
    """Component -> version read back from the process; null where its log did not say."""
    findings: tuple[Finding, ...]
    """What the run itself saw that makes the point unfit to publish: offload not proven, or proven in the control."""
    proofs: dict[str, bool]
    """Proof -> whether its line was seen."""
    services: tuple[StartedService, ...]
    client_argv: tuple[str, ...]
    client_exit_code: int
    trace_content_sha256: str
    traces: int
    """Sessions in the replayed set."""
    ceiling_share: float
    host: Host
    git_revision: str | None
    artefacts: tuple[Artefact, ...]
    integrity: str = "not asked"
    """What the probe prompts showed: whether answers were the same after their KV cache was evicted and restored."""
    preflight: tuple[str, ...] = ()
    """Warnings of the preflight on this node."""
    image_digest: str | None = None
    """Of the container image that served; null where services ran without one."""
    left_behind: tuple[str, ...] = ()
    """What was found after everything had been stopped, and whether it was removed."""
    shared: SharedServer | None = None
    """None: the point had a server of its own."""


# --------------------------------------------------------------------------------------------- replay and proofs
def replay_sessions(attempt: Attempt) -> tuple[tuple[str, ...], int, tuple[Finding, ...]]:
    """Run the client to its end while watching the services; return its argv, its exit code and what was noticed."""
    parts, settings = attempt.parts, attempt.point.replay
    paths = replay.ReplayPaths(
        environment=parts.client,
        sessions=parts.sessions,
        hf_home=parts.hf_home,
        dataset_cache=parts.dataset_cache,
        artefacts=attempt.folder / "client",
    )
    plan = attempt.point.plan
    url = attempt.url(plan.api_port)
    argv = replay.command(settings, attempt.point.concurrency, plan.served_model_name, parts.tokenizer, url, paths)
    log = attempt.log_of("client")
    env = {**plan.client_env, **replay.environment_variables(paths)}
    power = watch.start_power_samples(attempt)
    try:
        client = attempt.start("client", Command(argv, env))
    except OSError as error:
        raise AttemptFailed(FailureClass.CONFIGURATION, f"the replay client cannot be started: {error}") from None
    limit_s = settings.warmup_grace_s + settings.duration_s + settings.grace_s + SUMMARY_S
    sampler = watch.Sampler(attempt, client, paths.artefacts / replay.RECORDS)
    try:
        _watch(attempt, client, sampler, log, paths.artefacts, limit_s)
        if power is not None:
            time.sleep(1.5)  # a sample after the window's end: energy is integrated up to it
    finally:
        # SIGINT first: the client then writes its summary of what it has; SIGTERM loses it.
        processes.stop(client, STOP_GRACE_S, signal.SIGINT)
        if power is not None:
            processes.stop(power, 2.0)
    # A server that died took the requests with it: what the client says then is only a symptom.
    attempt.check_alive()
    result = replay.outcome(client.popen.returncode, log, paths.artefacts)
    if result.problem:
        raise AttemptFailed(FailureClass.CLIENT_FAILED, result.problem)
    noticed = sampler.clock.finding()
    return argv, client.popen.returncode, (noticed,) if noticed else ()


def _watch(
    attempt: Attempt, client: Managed, sampler: watch.Sampler, log: Path, artefacts: Path, limit_s: float
) -> None:
    begin, said, noted, profiling_since = time.monotonic(), 0.0, 0.0, None
    settings = attempt.point.replay
    while client.alive:
        attempt.check_parent()
        attempt.check_alive()
        sampler.look()
        now = time.monotonic()
        if now - begin > limit_s:
            watch.keep_evidence(attempt)
            raise AttemptFailed(FailureClass.OUT_OF_TIME, f"the replay client still runs after {limit_s:.0f} s")
        if now - noted >= NOTE_SHM_S:
            noted = now
            leftovers.note(attempt.folder, attempt.members())
        if now - said >= 5.0:
            said = now
            state = replay.progress(log, artefacts)
            if state.phase == "profiling" and profiling_since is None:
                profiling_since = now
            since = now - profiling_since if profiling_since is not None else 0.0
            left_s = max(0.0, settings.duration_s - since) + settings.grace_s
            if state.phase in ("preparing", "warm-up"):
                left_s += attempt.point.costs.warmup_s
            attempt.say(f"replay: {state.phase}, {state.requests} requests, about {left_s:.0f} s left")
        time.sleep(0.25)


def proofs_of(attempt: Attempt) -> tuple[dict[str, bool], tuple[Finding, ...]]:
    """Look for the plan's proofs in the logs; return which were seen, and a finding for each that does not hold."""
    seen: dict[str, bool] = {}
    unmet = []
    for proof in attempt.point.plan.proofs:
        pattern = re.compile(proof.pattern)
        seen[proof.name] = any(pattern.search(line) for line in attempt.proof_lines(proof.service))
        if seen[proof.name] != proof.expected:
            unmet.append(proof.unmet(attempt.point.arm))
    return seen, tuple(unmet)


Rounds = tuple[tuple[integrity.Answer, ...], tuple[integrity.Answer, ...]]


def probe_before(attempt: Attempt) -> Rounds | str:
    """Ask the probe prompts before the replay; what they cause in the logs proves nothing."""
    with _own_lines(attempt):
        return integrity.ask_before(attempt)


def probe_after(attempt: Attempt, before: Rounds | str) -> tuple[str, tuple[Finding, ...]]:
    """Ask the probe prompts again; return what they show in words, and as a finding if answers have changed."""
    if isinstance(before, str):
        return f"not checked: {before}", ()
    with _own_lines(attempt):
        restored = integrity.ask_after(attempt)
    if isinstance(restored, str):
        return f"not checked: {restored}", ()
    seen = integrity.judge(*before, restored)
    integrity.write(attempt.folder, seen)
    found = integrity.finding(seen)
    return integrity.in_words(seen), (found,) if found else ()


@contextlib.contextmanager
def _own_lines(attempt: Attempt) -> Iterator[None]:
    """Mark the stretch that every log grows by in the meantime as caused by ourselves."""
    logs = {service.name: attempt.log_of(service.name) for service in attempt.point.plan.services}
    starts = {name: log.stat().st_size for name, log in logs.items()}
    try:
        yield
    finally:
        for name, log in logs.items():
            attempt.probe_spans.setdefault(name, []).append((starts[name], log.stat().st_size))


def scrape(attempt: Attempt, moment: str) -> None:
    """Keep the raw metrics of every endpoint."""
    for port, path in attempt.point.plan.metrics:
        text = endpoints.fetch(attempt.url(port, path))
        if text is not None:
            write_atomic(attempt.folder / "metrics" / f"{port}.{moment}.prom", text)


# --------------------------------------------------------------------------------------------------- the attempt
def measure(attempt: Attempt) -> Run:
    """Serve, replay, stop and describe; raises AttemptFailed or Interrupted, with nothing left running either way."""
    started = time.time()
    left_behind: list[str] = []
    with served(attempt, left_behind) as warnings:
        seen = observe(attempt)
    return describe(attempt, started, attempt.phases_s["serve"], seen, warnings, left_behind)


@contextlib.contextmanager
def served(attempt: Attempt, left_behind: list[str]) -> Iterator[tuple[str, ...]]:
    """Serve the attempt's plan and yield the node's warnings; at the end all is stopped and `left_behind` filled.

    Raises AttemptFailed where serving fails, out_of_memory where the kernel killed a process in the meantime.
    """
    plan = attempt.point.plan
    if plan.blocked_by:
        raise AttemptFailed(FailureClass.CONFIGURATION, "; ".join(blocker.says for blocker in plan.blocked_by))
    attempt.folder.mkdir(parents=True)
    warnings = startup.check_node(attempt)
    memory = startup.gpu_memory_used_shares()
    # Before the guard, a process of its own: folders that cannot be made must not leave it behind.
    with scratch.claimed(attempt.scratch, plan.scratch):
        guard = attempt.guard = Guard(attempt.name, PROJECT)
        try:
            with blame_memory():
                with attempt.phase("serve"):
                    startup.serve(attempt)
                yield warnings
        finally:
            attempt.stopping.set()
            with attempt.phase("stop"):
                attempt.stop()
                guard.close()
                left_behind += clean_up(attempt, memory)


@contextlib.contextmanager
def blame_memory() -> Iterator[None]:
    """Turn a failure during which the kernel killed processes of this job into out_of_memory."""
    killed = oom_kills()
    try:
        yield
    except AttemptFailed as error:
        count = (oom_kills() or 0) - (killed or 0)
        if count > 0:
            says = f"{error.message}; the kernel killed {count} processes of this job for its memory"
            raise AttemptFailed(FailureClass.OUT_OF_MEMORY, says) from error
        raise


@dataclass(frozen=True)
class Observed:
    """What was seen of one point on a server."""

    versions: dict[str, str | None]
    client_argv: tuple[str, ...]
    client_exit_code: int
    findings: tuple[Finding, ...]
    integrity: str


def observe(attempt: Attempt, check: Callable[[Rounds], None] = lambda _rounds: None) -> Observed:
    """Replay against a server that is ready, between two rounds of probe prompts; raises AttemptFailed.

    `check` looks at the answers before the replay.
    """
    versions = startup.versions_of(attempt)
    leftovers.note(attempt.folder, attempt.members())
    with attempt.phase("probe"):
        answers = probe_before(attempt)
        if not isinstance(answers, str):
            check(answers)
    scrape(attempt, "before")
    with attempt.phase("replay"):
        client_argv, exit_code, noticed = replay_sessions(attempt)
    scrape(attempt, "after")
    with attempt.phase("check"):
        words, changed = probe_after(attempt, answers)
    leftovers.note(attempt.folder, attempt.members())
    return Observed(versions, client_argv, exit_code, (*noticed, *changed), words)


def describe(
    attempt: Attempt,
    started_unix_s: float,
    startup_s: float,
    seen: Observed,
    warnings: tuple[str, ...],
    left_behind: Iterable[str] = (),
    shared: SharedServer | None = None,
) -> Run:
    """Judge the proofs, read every artefact back and say what ran."""
    proofs, findings = proofs_of(attempt)
    return Run(
        schema_version=Run.SCHEMA_VERSION,
        point=attempt.point.id,
        attempt=attempt.name,
        started_unix_s=started_unix_s,
        phases_s=attempt.phases_s,
        startup_s=startup_s,
        versions=seen.versions,
        findings=(*findings, *seen.findings),
        proofs=proofs,
        services=tuple(attempt.started),
        client_argv=seen.client_argv,
        client_exit_code=seen.client_exit_code,
        trace_content_sha256=attempt.parts.manifest.content_sha256,
        traces=attempt.parts.manifest.sessions,
        ceiling_share=attempt.parts.manifest.ceiling_share,
        host=host_facts(),
        git_revision=git_revision(),
        artefacts=artefacts_of(attempt.folder),
        integrity=seen.integrity,
        preflight=warnings,
        image_digest=attempt.launcher.image.digest if attempt.launcher.image is not None else None,
        left_behind=tuple(left_behind),
        shared=shared,
    )


def clean_up(attempt: Attempt, memory_before: list[float]) -> list[str]:
    """Remove our shared memory once every process is gone, and see that GPU memory is back; return what was found."""
    found = [f"removed from /dev/shm: {name}" for name in leftovers.remove([attempt.folder])]
    found += scratch.remove(attempt.scratch)
    if memory_before:

        def back() -> bool:
            return max(startup.gpu_memory_used_shares(), default=0.0) <= max(memory_before) + 0.02

        if not processes.wait_until(back, GPU_SETTLES_S, interval_s=1.0):
            found.append(f"GPU memory is not back to {max(memory_before):.0%} after {GPU_SETTLES_S:.0f} s")
    for line in found:
        attempt.say(line)
    return found


def remove_left_behind(runs: Path, cluster: Cluster, attempt: str) -> None:
    """Remove what killed attempts on this node left in /dev/shm, if they are of this sweep, and in scratch folders."""
    dead = []
    for ledger in runs.glob(f"*/*/{leftovers.LEDGER}"):
        holder = live_lease(ledger.parents[1])
        if holder is None or holder.attempt in (attempt, "") or holder.attempt != ledger.parent.name:
            dead.append(ledger.parent)
    for name in leftovers.remove(dead):
        print(f"removed from /dev/shm, left by a killed attempt: {name}", file=sys.stderr)
    for line in scratch.remove_dead(runs, cluster):
        print(line, file=sys.stderr)


def artefacts_of(folder: Path) -> tuple[Artefact, ...]:
    """Read every file of an attempt back and return its size and hash."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return tuple(
        Artefact(path=str(path.relative_to(folder)), bytes=path.stat().st_size, sha256=file_sha256(path))
        for path in files
    )


def host_facts() -> Host:
    """Describe this node."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.is_file() else ""
    model = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    cpu = model[1] if model else platform.machine()
    return Host(
        name=socket.gethostname(),
        cpu=cpu,
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        kernel=platform.release(),
        python=platform.python_version(),
    )


def git_revision() -> str | None:
    """Return the revision of this checkout, `-dirty` added if tracked files differ; None outside of git."""
    argv = ["git", "-C", str(PROJECT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


# --------------------------------------------------------------------------------------------- command line
def attempt_name() -> str:
    """Return a name for this attempt: the Slurm job where there is one, else time and process."""
    job = os.environ.get("SLURM_JOB_ID")
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    return f"job{job}-{stamp}" if job else f"{stamp}-{os.getpid()}"


def run(
    point: Point,
    out: Path,
    results: Path,
    environments: Path,
    *,
    cluster: Cluster,
    tries: int,
    parent: int | None,
    log: Path | None,
) -> int:
    """Measure a point and publish OUT/run.json; return the exit code. A failure is recorded and shown."""
    name = attempt_name()
    folder = out / name
    failures = results / "failures"
    try:
        if tries > 1 and (before := last_failure(failures, point.id)) and not before.worth_retrying:
            print(f"{point.id}: not tried again: {before.failure_class}: {before.message}", file=sys.stderr)
            return 1
        with lease(out, name) as stopping, interruptible(stopping):
            remove_left_behind(out.parent, cluster, name)
            parts = find_parts(point, results, environments, cluster.model_paths)
            image = find_image(cluster, point.row.image, results)
            launcher = launcher_for(point, cluster, image, parts, folder.resolve(), name)
            attempt = Attempt(point, name, folder.resolve(), parts, launcher, parent, stopping, log)
            publish(measure(attempt), attempt, out)
            return 0
    except Exception as error:
        ended = how_it_failed(error, out)
        record_failure(point, name, folder, failures, ended)
        if ended.defect:
            raise
        return ended.exit_code


def publish(finished: Run, attempt: Attempt, out: Path) -> None:
    """Write a measurement with its attempt and as OUT/run.json."""
    # Also with the attempt: a head process that takes over from one that died removes OUT/run.json as a file that is
    # about to be made.
    finished.write(attempt.folder / "run.json")
    finished.write(out / "run.json")
    attempt.say(f"measured in {sum(attempt.phases_s.values()):.0f} s: {out / 'run.json'}")


@dataclass(frozen=True)
class Failed:
    """How an attempt failed."""

    failure_class: FailureClass
    message: str
    exit_code: int = 1
    defect: bool = False
    """A defect of this workflow: its traceback has to be seen."""


def how_it_failed(error: Exception, out: Path) -> Failed:
    """Return the class, the message and the exit code of what ended an attempt that writes to `out`."""
    if isinstance(error, AttemptFailed):
        return Failed(error.failure_class, error.message)
    if isinstance(error, InputError):
        return Failed(FailureClass.CONFIGURATION, str(error))
    if isinstance(error, Interrupted):
        return Failed(FailureClass.INTERRUPTED, str(error), error.exit_code)
    if isinstance(error, OSError):
        return Failed(FailureClass.OUTPUT_NOT_WRITTEN, f"{error.strerror or error}: {error.filename or out}")
    return Failed(FailureClass.UNKNOWN, f"{type(error).__name__}: {error}", defect=True)


def launcher_for(
    point: Point, cluster: Cluster, image: Image | None, parts: Parts, folder: Path, attempt: str
) -> Launcher:
    """Return how services are started for a point on its cluster; a container sees what its placeholders name."""
    situation = Situation(row=point.row, cache=point.plan.cache, options={})
    read = [PROJECT, *parts.paths.values(), *parts.environments.values()]
    # What is not there cannot be mounted: a plan without scratch has no such folder.
    beside = point.plan.scratch and cluster.scratch is not None
    written = [folder, scratch.folder_of(cluster, folder, attempt)] if beside else [folder]
    return Launcher(
        cluster=cluster,
        image=image,
        vendor=situation.vendor,
        mounts=(*((path, "ro") for path in read), *((path, "rw") for path in written)),
    )


def record_failure(point: Point, attempt: str, folder: Path, failures: Path, ended: Failed) -> Failure:
    """Write the record of an attempt that failed, with the first cause in its logs, and show it."""
    kind, message = ended.failure_class, ended.message
    services = [folder / f"{service.name}.log" for service in point.plan.services]
    client = folder / "client.log"
    seen = diagnose(kind, services, client)
    record = Failure(
        schema_version=Failure.SCHEMA_VERSION,
        point=point.id,
        attempt=attempt,
        failure_class=seen.failure_class,
        message=message,
        first_cause=seen.first_cause,
        worth_retrying=seen.failure_class in WORTH_RETRYING,
        unix_s=time.time(),
        logs=tuple(str(log) for log in (*services, client) if log.exists()),
        seen_as=kind,
        known_as=seen.known_as,
    )
    path = failures / f"{point.id}.{attempt}.json"
    shown = [f"{point.id}: {seen.failure_class}: {message}"]
    shown += [f"first cause: {seen.first_cause}"] if seen.first_cause else []
    shown += [f"known as: {seen.known_as}"] if seen.known_as else []
    try:
        record.write(path)
        shown.append(f"record: {path}")
    except OSError as error:
        shown.append(f"no record was written ({error})")
    print("; ".join(shown), file=sys.stderr)
    return record


@contextlib.contextmanager
def interruptible(stopping: threading.Event) -> Iterator[None]:
    """Turn SIGINT, SIGTERM and SIGHUP into Interrupted, once; a second one must not interrupt the clean-up."""

    def handle(number: int, _frame: FrameType | None) -> None:
        if not stopping.is_set():
            stopping.set()
            raise Interrupted(f"stopped by {signal.Signals(number).name}", 128 + number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main() -> int:
    """Run one point by hand or from the rule."""
    parser = argparse.ArgumentParser(prog="python -m workflow.runs", description="Measure one point on this node.")
    parser.add_argument("point", type=Path, help="a point file, results/points/<id>.json")
    parser.add_argument("out", type=Path, help="folder of the point's runs, results/runs/<id>")
    parser.add_argument("--results", type=Path, default=Path("results"), help="where traces and models are prepared")
    parser.add_argument("--environments", type=Path, default=Path(".envs"), help="where environments are prepared")
    parser.add_argument(
        "--clusters", type=Path, default=Path("configs/clusters.yaml"), help="how the point's runner starts services"
    )
    parser.add_argument(
        "--try",
        type=int,
        default=1,
        dest="tries",
        help="number of this try; from the second on, a failure that is not worth retrying ends the attempt at once",
    )
    parser.add_argument("--log", type=Path, help="file that progress is appended to, beside standard error")
    parser.add_argument("--stop-with-parent", action="store_true", help="end when the calling process is gone")
    arguments = parser.parse_args()
    parent = os.getppid() if arguments.stop_with_parent else None
    try:
        point = Point.read(arguments.point)
        cluster = cluster_of(point, arguments.clusters)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return run(
        point,
        arguments.out,
        arguments.results,
        arguments.environments,
        cluster=cluster,
        tries=arguments.tries,
        parent=parent,
        log=arguments.log,
    )


if __name__ == "__main__":
    sys.exit(main())
