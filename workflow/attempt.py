"""One try at a point: its folder, its ports and paths, its processes, and what it says while it goes on."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from workflow import processes, scratch
from workflow.contract import Strict
from workflow.failures import AttemptFailed, FailureClass
from workflow.launchers import Command, Launcher
from workflow.parts import Parts
from workflow.points import Point
from workflow.processes import Guard, Managed

PROJECT = Path(__file__).resolve().parents[1]
STOP_GRACE_S = 10.0


class Interrupted(Exception):
    """A signal, or the end of the process that started this one."""

    def __init__(self, why: str, exit_code: int) -> None:
        self.exit_code = exit_code
        super().__init__(why)


class StartedService(Strict):
    """A service as it was really started: ports and paths filled in."""

    name: str
    argv: tuple[str, ...]
    env: dict[str, str]
    log: str


@dataclass
class Attempt:
    """One try at a point: its folder, its processes and what it has seen so far."""

    point: Point
    name: str
    folder: Path
    parts: Parts
    launcher: Launcher
    parent: int | None
    """Pid that has to stay our parent; None: nobody."""
    stopping: threading.Event
    """Set once the attempt is over, for whatever reason: from then on signals wait and the lease says so."""
    log: Path | None = None
    ports: dict[str, int] = field(default_factory=dict)
    running: list[Managed] = field(default_factory=list)
    started: list[StartedService] = field(default_factory=list)
    phases_s: dict[str, float] = field(default_factory=dict)
    guard: Guard | None = None
    sessions: set[int] = field(default_factory=set)
    """Pids of all processes that were started, each the leader of a session."""
    probe_spans: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """Service -> stretches of its log, in bytes, that prove nothing: our own probe prompts caused them, or the points
    that were measured on the same server before."""
    logs: Path | None = None
    """Folder of the services' logs where another attempt started them; None: our own."""
    scratch: Path = field(init=False)
    """Folder of the folders that the services write to; that of the attempt that started them."""

    def __post_init__(self) -> None:
        """Lay the scratch folder out for services of our own."""
        self.scratch = scratch.folder_of(self.launcher.cluster, self.folder, self.name)

    def say(self, text: str) -> None:
        """Show progress to whoever watches."""
        line = f"[{time.strftime('%H:%M:%S')}] {self.point.id}: {text}"
        # Who watched may be gone (a closed terminal) and the disk full; that must not cut the clean-up short.
        with contextlib.suppress(OSError):
            if self.log is not None:
                with self.log.open("a") as stream:
                    stream.write(line + "\n")
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

    def check_alive(self) -> None:
        """Raise AttemptFailed once a service has ended."""
        for process in self.running:
            if not process.alive:
                kind = FailureClass.ENGINE_DIED if process.name == "engine" else FailureClass.SIDECAR_DIED
                raise AttemptFailed(kind, f"{process.name} {how_it_ended(process.popen.returncode)}")

    def start(self, name: str, command: Command, unset: tuple[str, ...] = (), log: str | None = None) -> Managed:
        """Start a process of the attempt; raises OSError if the program cannot be started."""
        path = self.log_of(name) if log is None else self.folder / log
        process = processes.start(
            name,
            command.argv,
            command.env,
            path,
            self.name,
            unset=unset,
            after=command.after,
            contained=command.contained,
        )
        self.sessions.add(process.popen.pid)
        if self.guard is not None:
            self.guard.watch(process)
        return process

    def members(self) -> list[psutil.Process]:
        """Return the attempt's live processes."""
        return processes.members(self.name, self.sessions)

    def url(self, port: str, path: str = "") -> str:
        """Return the address of one of the attempt's ports."""
        return f"http://127.0.0.1:{self.ports[port]}{path}"

    def paths(self) -> dict[str, str]:
        """Return what the plan's path placeholders stand for in this attempt."""
        fixed = {"project": PROJECT, "attempt": self.folder, **self.parts.paths}
        files = {file.path: self.folder / file.filename for file in self.point.plan.files}
        written = {name: self.scratch / name for name in self.point.plan.scratch}
        return {name: str(path) for name, path in {**fixed, **files, **written}.items()}

    def log_of(self, service: str) -> Path:
        """Return where the output of a service or of the client goes."""
        folder = self.folder if service == "client" or self.logs is None else self.logs
        return folder / f"{service}.log"

    def proof_lines(self, service: str) -> Iterator[str]:
        """Yield a service's log lines, without those that our own probe prompts caused."""
        data = self.log_of(service).read_bytes()
        begin = 0
        kept = []
        for start, end in self.probe_spans.get(service, []):
            kept.append(data[begin:start])
            begin = end
        kept.append(data[begin:])
        yield from b"".join(kept).decode(errors="replace").splitlines()

    def stop(self) -> None:
        """Stop the services in reverse order, with everything they started."""
        while self.running:
            processes.stop(self.running.pop(), STOP_GRACE_S)
        if swept := processes.sweep(self.name, sessions=self.sessions):
            self.say(f"ended what was left behind: {'; '.join(swept)}")


def how_it_ended(code: int) -> str:
    """Return a process's exit code in words; a negative one is a signal."""
    return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
