"""One point on one node, from claim to publish: serve the model, replay the sessions, keep everything.

`python -m workflow.runs POINT OUT` is what the rule `run_point` calls and what a person can call by hand. Each attempt
writes to a folder of its own, OUT/<attempt>/; OUT/run.json is written last, after every artefact was read back, so
that a job which is killed at any moment leaves nothing that a later run takes for a result.
"""

import argparse
import contextlib
import http.client
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from workflow import processes, replay
from workflow.contract import Document, Finding, InputError, Reason, Strict, file_sha256, write_atomic
from workflow.failures import WORTH_RETRYING, AttemptFailed, Failure, FailureClass, first_cause, last_failure
from workflow.parts import Parts, find_parts
from workflow.points import Point
from workflow.processes import Guard, Managed
from workflow.serving import Service, fill, ports_of

PROJECT = Path(__file__).resolve().parents[1]
BEAT_S = 5.0
LEASE_EXPIRES_S = 60.0
"""A lease of another host counts as left behind when it has not been renewed for this long."""
STOP_GRACE_S = 10.0
SUMMARY_S = 120.0
"""How long the client may take to prepare its dataset and to write its summary, beside warm-up, window and drain."""


class Artefact(Strict):
    """A file of the attempt, as it was read back before the run was published."""

    path: str
    """Relative to the attempt's folder."""
    bytes: int
    sha256: str


class StartedService(Strict):
    """A service as it was really started: ports and paths filled in."""

    name: str
    argv: tuple[str, ...]
    env: dict[str, str]
    log: str


class Host(Strict):
    """The node that measured."""

    name: str
    cpu: str
    cores: int
    memory_bytes: int
    kernel: str
    python: str


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


# -------------------------------------------------------------------------------------------------- the lease
class Lease(Strict):
    """Who is measuring a point right now."""

    attempt: str
    host: str
    pid: int
    created_unix_s: float
    """Start time of the process: a pid alone is reused."""
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
        created_unix_s=psutil.Process().create_time(),
        stopping=False,
    )
    _take(path, mine)

    def beat() -> None:
        said, since = False, 0.0
        while not done.wait(0.2):
            since += 0.2
            if since >= BEAT_S or (stopping.is_set() and not said):
                _write_lease(path, mine, stopping.is_set())
                said, since = stopping.is_set(), 0.0

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield stopping
    finally:
        done.set()
        thread.join()
        path.unlink(missing_ok=True)


def _write_lease(path: Path, mine: Lease, stopping: bool) -> None:
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
                holder = _holder(path)
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


def _holder(path: Path) -> Lease | None:
    """Return the live holder of a lease, or None if it was left behind."""
    try:
        found = Lease.model_validate_json(path.read_bytes())
        age_s = time.time() - path.stat().st_mtime
    except (FileNotFoundError, ValueError):
        return None
    if found.host != socket.gethostname():
        return found if age_s < LEASE_EXPIRES_S else None
    try:
        same = abs(psutil.Process(found.pid).create_time() - found.created_unix_s) < 1.0
    except psutil.NoSuchProcess:
        return None
    return found if same else None


def live_lease(out: Path) -> Lease | None:
    """Return the lease of the attempt that holds a point now, or None."""
    return _holder(out / "lease.json")


def _wait_for_stopping(path: Path) -> None:
    def gone() -> bool:
        holder = _holder(path)
        return holder is None or not holder.stopping

    processes.wait_until(gone, deadline_s=3 * STOP_GRACE_S)


# -------------------------------------------------------------------------------------------- the attempt
class Interrupted(Exception):
    """A signal, or the end of the process that started this one."""

    def __init__(self, why: str, exit_code: int) -> None:
        self.exit_code = exit_code
        super().__init__(why)


@dataclass
class Attempt:
    """One try at a point: its folder, its processes and what it has seen so far."""

    point: Point
    name: str
    folder: Path
    parts: Parts
    parent: int | None
    """Pid that has to stay our parent; None: nobody."""
    stopping: threading.Event
    """Set once the attempt is over, for whatever reason: from then on signals wait and the lease says so."""
    log: Path | None = None
    ports: dict[str, int] = field(default_factory=dict)
    running: list[Managed] = field(default_factory=list)
    started: list[StartedService] = field(default_factory=list)
    phases_s: dict[str, float] = field(default_factory=dict)

    def say(self, text: str) -> None:
        """Show progress to whoever watches."""
        line = f"[{time.strftime('%H:%M:%S')}] {self.point.id}: {text}"
        if self.log is not None:
            with self.log.open("a") as stream:
                stream.write(line + "\n")
        # Who watched may be gone (a closed terminal); that must not cut the clean-up short.
        with contextlib.suppress(OSError):
            print(line, file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase, also one that fails."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self.phases_s[name] = round(time.monotonic() - begin, 3)

    def check_parent(self) -> None:
        """Raise Interrupted once the process that started us is gone: nobody is left who wants the result."""
        if self.parent is not None and os.getppid() != self.parent:
            raise Interrupted("the process that started this one is gone", 1)

    def url(self, port: str, path: str = "") -> str:
        """Return the address of one of the attempt's ports."""
        return f"http://127.0.0.1:{self.ports[port]}{path}"

    # ------------------------------------------------------------------------------------------- serve
    def serve(self) -> None:
        """Start all services in order, each until it is ready; raises AttemptFailed."""
        plan = self.point.plan
        if plan.blocked_by:
            raise AttemptFailed(FailureClass.CONFIGURATION, "; ".join(blocker.says for blocker in plan.blocked_by))
        self.ports = processes.free_ports(ports_of(plan))
        for name in plan.scratch:
            (self.folder / "scratch" / name).mkdir(parents=True)
        for file in plan.files:
            write_atomic(self.folder / file.filename, fill(file.text, self.ports, self.paths()).encode())
        for service in self.point.plan.services:
            self._start(service)
        self._probe_model()

    def paths(self) -> dict[str, str]:
        """Return what the plan's path placeholders stand for in this attempt."""
        fixed = {"project": PROJECT, "model": self.parts.model, "attempt": self.folder}
        files = {file.path: self.folder / file.filename for file in self.point.plan.files}
        scratch = {name: self.folder / "scratch" / name for name in self.point.plan.scratch}
        return {name: str(path) for name, path in {**fixed, **files, **scratch}.items()}

    def _start(self, service: Service) -> None:
        paths = self.paths()
        argv = tuple(fill(word, self.ports, paths) for word in service.argv)
        if service.environment is not None:
            argv = (str(self.parts.environments[service.environment] / "bin" / argv[0]), *argv[1:])
        env = {name: fill(value, self.ports, paths) for name, value in service.env.items()}
        log = self.folder / f"{service.name}.log"
        self.started.append(StartedService(name=service.name, argv=argv, env=env, log=log.name))
        try:
            process = processes.start(service.name, argv, env, log, self.name, unset=service.unset)
        except OSError as error:
            raise AttemptFailed(FailureClass.CONFIGURATION, f"{service.name} cannot be started: {error}") from None
        self.running.append(process)
        begin = time.monotonic()
        self.say(f"{service.name}: starting, at most {service.probe.deadline_s:.0f} s")

        def ready() -> bool:
            self.check_parent()
            self._check_alive()
            return processes.owns_port(process, self.ports[service.probe.port]) and _get(
                self.url(service.probe.port, service.probe.path)
            )

        if not processes.wait_until(ready, service.probe.deadline_s):
            raise AttemptFailed(
                FailureClass.ENGINE_NOT_READY, f"{service.name} was not ready after {service.probe.deadline_s:.0f} s"
            )
        self.say(f"{service.name}: ready after {time.monotonic() - begin:.1f} s")

    def _check_alive(self) -> None:
        for process in self.running:
            if not process.alive:
                kind = FailureClass.ENGINE_DIED if process.name == "engine" else FailureClass.SIDECAR_DIED
                raise AttemptFailed(kind, f"{process.name} ended with code {process.popen.returncode}")

    def _probe_model(self) -> None:
        """Prove that our model answers: a healthy server with another model wastes the whole window."""
        name = self.point.plan.served_model_name
        port = self.point.plan.api_port
        models = _get_json(self.url(port, "/v1/models"))
        served = [entry.get("id") for entry in models.get("data", [])] if isinstance(models, dict) else []
        if name not in served:
            raise AttemptFailed(
                FailureClass.CONFIGURATION, f"the server names models {served}, the point asks for {name!r}"
            )
        body = {"model": name, "messages": [{"role": "user", "content": "ready?"}], "max_tokens": 2}
        answer = _get_json(self.url(port, "/v1/chat/completions"), body)
        tokens = (answer.get("usage") or {}).get("completion_tokens", 0) if isinstance(answer, dict) else 0
        if not tokens:
            raise AttemptFailed(FailureClass.ENGINE_NOT_READY, f"the server answers a probe without a token: {answer}")

    def scrape(self, moment: str) -> None:
        """Keep the raw metrics of every endpoint."""
        for port, path in self.point.plan.metrics:
            with contextlib.suppress(OSError, http.client.HTTPException):
                text = urllib.request.urlopen(self.url(port, path), timeout=10).read()  # noqa: S310 - our own server
                write_atomic(self.folder / "metrics" / f"{port}.{moment}.prom", text)

    # ------------------------------------------------------------------------------------------ replay
    def replay(self) -> tuple[tuple[str, ...], int]:
        """Run the client to its end while watching the services; return its argv and exit code."""
        paths = replay.ReplayPaths(
            environment=self.parts.client,
            sessions=self.parts.sessions,
            hf_home=self.parts.hf_home,
            dataset_cache=self.parts.dataset_cache,
            artefacts=self.folder / "client",
        )
        settings, model = self.point.replay, self.point.plan.served_model_name
        argv = replay.command(
            settings, self.point.concurrency, model, self.point.row.model, self.url(self.point.plan.api_port), paths
        )
        log = self.folder / "client.log"
        env = {**self.point.plan.client_env, **replay.environment_variables(paths)}
        client = processes.start("client", argv, env, log, self.name)
        limit_s = settings.warmup_grace_s + settings.duration_s + settings.grace_s + SUMMARY_S
        try:
            self._watch(client, log, paths.artefacts, limit_s)
        finally:
            # SIGINT first: the client then writes its summary of what it has; SIGTERM loses it.
            processes.stop(client, STOP_GRACE_S, signal.SIGINT)
        result = replay.outcome(client.popen.returncode, log, paths.artefacts)
        if result.problem:
            raise AttemptFailed(FailureClass.CLIENT_FAILED, result.problem)
        return argv, client.popen.returncode

    def _watch(self, client: Managed, log: Path, artefacts: Path, limit_s: float) -> None:
        begin, said, profiling_since = time.monotonic(), 0.0, None
        settings = self.point.replay
        while client.alive:
            self.check_parent()
            self._check_alive()
            now = time.monotonic()
            if now - begin > limit_s:
                raise AttemptFailed(FailureClass.OUT_OF_TIME, f"the replay client still runs after {limit_s:.0f} s")
            if now - said >= 5.0:
                said = now
                state = replay.progress(log, artefacts)
                if state.phase == "profiling" and profiling_since is None:
                    profiling_since = now
                since = now - profiling_since if profiling_since is not None else 0.0
                left_s = max(0.0, settings.duration_s - since) + settings.grace_s
                if state.phase in ("preparing", "warm-up"):
                    left_s += self.point.costs.warmup_s
                self.say(f"replay: {state.phase}, {state.requests} requests, about {left_s:.0f} s left")
            time.sleep(0.25)

    # -------------------------------------------------------------------------------------------- stop
    def stop(self) -> None:
        """Stop the services in reverse order, with everything they started."""
        while self.running:
            processes.stop(self.running.pop(), STOP_GRACE_S)
        if swept := processes.sweep(self.name):
            self.say(f"ended what was left behind: {'; '.join(swept)}")

    def lines(self, service: str) -> Iterator[str]:
        """Yield the log lines of a service."""
        with (self.folder / f"{service}.log").open(errors="replace") as stream:
            yield from stream


def versions_of(attempt: Attempt) -> dict[str, str | None]:
    """Read the versions in use back from the logs; raises AttemptFailed where a declared one does not serve."""
    found: dict[str, str | None] = {}
    for probe in attempt.point.plan.versions:
        pattern = re.compile(probe.pattern)
        match = next((match for line in attempt.lines(probe.service) if (match := pattern.search(line))), None)
        found[probe.component] = match["version"] if match else None
        if probe.declared is not None and found[probe.component] != probe.declared:
            raise AttemptFailed(
                FailureClass.VERSION_MISMATCH,
                f"{probe.component} {found[probe.component] or '?'} serves, {probe.declared} is declared",
            )
    return found


def proofs_of(attempt: Attempt) -> tuple[dict[str, bool], tuple[Finding, ...]]:
    """Look for the plan's proofs in the logs; return which were seen, and a finding for each that does not hold."""
    seen: dict[str, bool] = {}
    findings = []
    for proof in attempt.point.plan.proofs:
        pattern = re.compile(proof.pattern)
        seen[proof.name] = any(pattern.search(line) for line in attempt.lines(proof.service))
        if seen[proof.name] != proof.expected:
            code = Reason.OFFLOAD_IN_CONTROL if attempt.point.arm == "none" else Reason.OFFLOAD_NOT_PROVEN
            findings.append(Finding(code=code, detail=f"not seen to hold: {proof.says} ({proof.name})"))
    return seen, tuple(findings)


def measure(attempt: Attempt) -> Run:
    """Serve, replay, stop and describe; raises AttemptFailed or Interrupted, with nothing left running either way."""
    started = time.time()
    guard = Guard(attempt.name, PROJECT)
    try:
        with attempt.phase("serve"):
            attempt.serve()
        versions = versions_of(attempt)
        attempt.scrape("before")
        with attempt.phase("replay"):
            client_argv, exit_code = attempt.replay()
        attempt.scrape("after")
    finally:
        attempt.stopping.set()
        with attempt.phase("stop"):
            attempt.stop()
            guard.close()
    seen, findings = proofs_of(attempt)
    return Run(
        schema_version=Run.SCHEMA_VERSION,
        point=attempt.point.id,
        attempt=attempt.name,
        started_unix_s=started,
        phases_s=attempt.phases_s,
        startup_s=attempt.phases_s["serve"],
        versions=versions,
        findings=findings,
        proofs=seen,
        services=tuple(attempt.started),
        client_argv=client_argv,
        client_exit_code=exit_code,
        trace_content_sha256=attempt.parts.manifest.content_sha256,
        traces=attempt.parts.manifest.sessions,
        ceiling_share=attempt.parts.manifest.ceiling_share,
        host=host_facts(),
        git_revision=git_revision(),
        artefacts=artefacts_of(attempt.folder),
    )


def artefacts_of(folder: Path) -> tuple[Artefact, ...]:
    """Read every file of an attempt back and return its size and hash."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return tuple(
        Artefact(path=str(path.relative_to(folder)), bytes=path.stat().st_size, sha256=file_sha256(path))
        for path in files
    )


def host_facts() -> Host:
    """Describe this node."""
    with contextlib.suppress(FileNotFoundError):
        model = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
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


def _get(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310 - our own server
            return bool(answer.status == http.HTTPStatus.OK)
    except (OSError, http.client.HTTPException):
        return False


def _get_json(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310 - our own server
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
            return json.loads(answer.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        return f"{type(error).__name__}: {error}"


# --------------------------------------------------------------------------------------------- command line
def attempt_name() -> str:
    """Return a name for this attempt: the Slurm job where there is one, else time and process."""
    job = os.environ.get("SLURM_JOB_ID")
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    return f"job{job}-{stamp}" if job else f"{stamp}-{os.getpid()}"


def run(
    point: Point, out: Path, results: Path, environments: Path, *, tries: int, parent: int | None, log: Path | None
) -> int:
    """Measure a point and publish OUT/run.json; return the exit code. A failure is recorded and shown."""
    name = attempt_name()
    folder = out / name
    failures = results / "failures"
    try:
        if tries > 1 and (before := last_failure(failures, point.id)) and not before.worth_retrying:
            print(f"{point.id}: not tried again: {before.failure_class}: {before.message}", file=sys.stderr)
            return 1
        with lease(out, name) as stopping, _signals(stopping):
            attempt = Attempt(
                point, name, folder.resolve(), find_parts(point, results, environments), parent, stopping, log
            )
            finished = measure(attempt)
            # Also with the attempt: a head process that takes over from one that died removes OUT/run.json as a file
            # that is about to be made.
            finished.write(folder / "run.json")
            finished.write(out / "run.json")
            attempt.say(f"measured in {sum(attempt.phases_s.values()):.0f} s: {out / 'run.json'}")
            return 0
    except AttemptFailed as error:
        failure, exit_code = (error.failure_class, error.message), 1
    except Interrupted as error:
        failure, exit_code = (FailureClass.INTERRUPTED, str(error)), error.exit_code
    _record(point, name, folder, failures, *failure)
    return exit_code


def _record(point: Point, attempt: str, folder: Path, failures: Path, kind: FailureClass, message: str) -> None:
    # The client's log last: what it reports is a symptom of what a service reports.
    logs = sorted(folder.glob("*.log"), key=lambda log: (log.name == "client.log", log.name))
    cause = None
    for log in logs:
        with log.open(errors="replace") as stream:
            cause = cause or first_cause(stream)
    record = Failure(
        schema_version=Failure.SCHEMA_VERSION,
        point=point.id,
        attempt=attempt,
        failure_class=kind,
        message=message,
        first_cause=cause,
        worth_retrying=kind in WORTH_RETRYING,
        unix_s=time.time(),
        logs=tuple(str(log) for log in logs),
    )
    path = failures / f"{point.id}.{attempt}.json"
    record.write(path)
    shown = [f"{point.id}: {kind}: {message}", *([f"first cause: {cause}"] if cause else []), f"record: {path}"]
    print("; ".join(shown), file=sys.stderr)


@contextlib.contextmanager
def _signals(stopping: threading.Event) -> Iterator[None]:
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
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return run(
        point,
        arguments.out,
        arguments.results,
        arguments.environments,
        tries=arguments.tries,
        parent=parent,
        log=arguments.log,
    )


if __name__ == "__main__":
    sys.exit(main())
