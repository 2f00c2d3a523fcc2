"""Start, probe, watch and stop the processes of a point. Nothing else in the workflow starts a long-lived process.

A process belongs to an attempt by any of three signs, since each of them alone is lost: it carries the attempt's token
in its environment (a program that renames itself, as vLLM and aiperf do, overwrites that), it is in the session of a
process that the attempt started (a child may open its own), or its parent belongs. A guard process outside the job's
group sweeps after the job even if the job itself is killed with SIGKILL.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

TOKEN_VARIABLE = "OFFLOAD_SWEEP_ATTEMPT"  # noqa: S105 - a mark on processes, not a secret


@dataclass(frozen=True)
class Managed:
    """A started process, leader of its own group."""

    name: str
    popen: subprocess.Popen[bytes]
    log: Path
    argv: tuple[str, ...]
    token: str
    after: tuple[str, ...] = ()
    """Command that ends what the process leaves with a daemon."""
    contained: bool = False
    """It only asks a daemon to start the service, which then runs elsewhere in the tree of processes."""
    started_unix_s: float = 0.0

    @property
    def alive(self) -> bool:
        """Tell whether the process still runs."""
        return self.popen.poll() is None


def start(
    name: str,
    argv: tuple[str, ...],
    env: Mapping[str, str],
    log: Path,
    token: str,
    unset: tuple[str, ...] = (),
    after: tuple[str, ...] = (),
    *,
    contained: bool = False,
) -> Managed:
    """Start a process in a session of its own, its output appended to `log`; `unset` are variables not to inherit.

    `after` is run when the process is stopped.

    Raises OSError if the program cannot be started.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    begin = time.time()
    inherited = {variable: value for variable, value in os.environ.items() if variable not in unset}
    with log.open("ab") as stream:
        popen = subprocess.Popen(
            argv,
            env={**inherited, **env, TOKEN_VARIABLE: token},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Managed(name, popen, log, argv, token, after, contained, begin)


def stop(process: Managed, grace_s: float, first: signal.Signals = signal.SIGTERM) -> int:
    """Stop a process and its group: `first`, then after `grace_s` seconds SIGKILL; return its exit code."""
    if process.alive:
        _signal_group(process.popen.pid, first)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.popen.wait(grace_s)
    # The group may outlive its leader, so it is killed even where the leader ended by itself.
    _signal_group(process.popen.pid, signal.SIGKILL)
    code = process.popen.wait()
    if process.after:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired), process.log.open("ab") as stream:
            subprocess.run(
                process.after, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, timeout=60, check=False
            )
    return code


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def members(token: str, sessions: Collection[int] = ()) -> list[psutil.Process]:
    """Return the live processes of an attempt, this one left out; `sessions` are the pids of what it started."""
    listed: dict[int, psutil.Process] = {}
    parents: dict[int, int] = {}
    found: set[int] = set()
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            listed[process.pid] = process
            parents[process.pid] = process.ppid()
            if os.getsid(process.pid) in sessions or process.environ().get(TOKEN_VARIABLE) == token:
                found.add(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            continue  # it ended, or is another user's: then it cannot be ours
    while more := {pid for pid, parent in parents.items() if parent in found and pid not in found}:
        found |= more
    return [listed[pid] for pid in sorted(found)]


def sweep(token: str, grace_s: float = 3.0, sessions: Collection[int] = ()) -> list[str]:
    """End every process of an attempt, politely first, and return what had to be ended, as `pid command`."""
    found = members(token, sessions)
    swept = []
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            swept.append(f"{process.pid} {' '.join(process.cmdline()[:6])}")
            process.terminate()
    psutil.wait_procs(found, timeout=grace_s)
    # A process may fork while it is being looked for, and shows no environment while it becomes another program: look
    # until nothing is seen twice in a row.
    clear = 0
    while clear < 2:
        left = members(token, sessions)
        clear = 0 if left else clear + 1
        if not left:
            time.sleep(0.05)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=1.0)
    return swept


class Guard:
    """A process of its own session that sweeps the attempt's processes once this process is gone, however it went."""

    def __init__(self, token: str, root: Path) -> None:
        read, self._write = os.pipe()
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "workflow.processes", token],
            stdin=read,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd=root,
            # Without the token: the guard must not sweep itself.
            env={name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE},
        )
        os.close(read)

    def watch(self, process: Managed) -> None:
        """Tell the guard of a process: its session, and what else has to be done to end it."""
        line = json.dumps({"session": process.popen.pid, "after": process.after}) + "\n"
        os.write(self._write, line.encode())

    def close(self) -> None:
        """Let the guard sweep and end, and wait for it."""
        os.close(self._write)
        self._popen.wait()


def free_ports(names: tuple[str, ...]) -> dict[str, int]:
    """Return a free TCP port for each name, chosen by the kernel; all are held until the last one is known."""
    with contextlib.ExitStack() as stack:
        sockets = {name: stack.enter_context(socket.socket()) for name in names}
        for held in sockets.values():
            held.bind(("127.0.0.1", 0))
        return {name: int(held.getsockname()[1]) for name, held in sockets.items()}


def owns_port(process: Managed, port: int) -> bool:
    """Tell whether the process, one of its descendants or a process with its mark listens on a port.

    A stranger's server answers probes too. In a container the listener is no descendant; it carries the mark or, where
    it has renamed itself, is at least younger than our start.
    """
    owner = listener(port)
    if owner is None:
        return False
    try:
        if any(one.pid == process.popen.pid for one in (owner, *owner.parents())):
            return True
        if process.contained and owner.create_time() >= process.started_unix_s - 1.0:
            return True
        return owner.environ().get(TOKEN_VARIABLE) == process.token
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def listener(port: int) -> psutil.Process | None:
    """Return the process that listens on a TCP port; None if nobody does, or another user's process."""
    for connection in psutil.net_connections(kind="tcp"):
        taken = connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
        if taken and connection.pid is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                return psutil.Process(connection.pid)
    return None


def wait_until(condition: Callable[[], bool], deadline_s: float, interval_s: float = 0.2) -> bool:
    """Call `condition` until it holds or the deadline has passed; tell whether it held."""
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() >= end:
            return False
        time.sleep(interval_s)
    return True


def _guard(token: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    told = sys.stdin.buffer.read()  # returns when the last writer of the pipe is gone
    watched = [json.loads(line) for line in told.splitlines()]
    for one in watched:
        if one["after"]:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(one["after"], stdin=subprocess.DEVNULL, timeout=60, check=False)
    sweep(token, sessions={int(one["session"]) for one in watched})


if __name__ == "__main__":
    _guard(sys.argv[1])
