"""What is seen of servers and node while a replay runs, kept raw, and when a replay is ended before its time.

A healthy port proves nothing: a server may accept requests and never give a token. Work done is counted from the
engine's own counters, and a replay without any is ended after a while, with what may explain it.
"""

import gzip
import json
import re
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from workflow import endpoints, leftovers, scratch
from workflow.attempt import Attempt
from workflow.contract import Finding, Reason
from workflow.failures import AttemptFailed, FailureClass
from workflow.launchers import Command
from workflow.processes import Managed
from workflow.readers.aliases import QUANTITIES
from workflow.startup import nvidia_smi

LONGEST_STALL_S = 300.0
"""Time at LEAST_TOK_PER_S or less after which a server counts as stalled; a shorter request timeout shortens it."""
LEAST_TOK_PER_S = 2.0
"""Tokens read and written, of all requests together. At this rate ten requests of 1,000 and 1,000 take 2.8 hours."""
STEP_TOKENS = 512.0
"""What a decoding step of llama.cpp may have read: it counts the tokens themselves only when the request has ended."""
STORM = 20
"""So many failed requests in a row end a replay."""
CLOCK_JUMP_S = 1.0
"""A wall clock that moves so far against the monotonic one makes the timestamps of a run useless."""
SHORT_WINDOW_S = 120.0

# Progress: counters that grow while tokens are read or written -> tokens a count. A name stands for itself and its
# `_total`.
WORK: Mapping[str, float] = {
    **{
        alias.name: 1.0
        for name in ("generation_tokens", "prompt_tokens", "tokens_computed")
        for alias in QUANTITIES[name].aliases
    },
    "llamacpp:n_decode": STEP_TOKENS,
}
# Requests that wait for a token. Queued ones count: a scheduler that dead-locks may run none.
PENDING = frozenset(
    {
        *("vllm:num_requests_running", "vllm:num_requests_waiting"),
        *("sglang:num_running_reqs", "sglang:num_queue_reqs"),
        *("atom:num_requests_running", "atom:num_requests_waiting"),
        *("llamacpp:requests_processing", "llamacpp:requests_deferred"),
    }
)
_SAMPLE = re.compile(rb"^([a-zA-Z_:][\w:]*)(?:\{[^\n]*\})?[ \t]+(\S+)", re.MULTILINE)


def totals(text: bytes) -> tuple[float | None, float | None]:
    """Return (tokens of work done, requests pending) from a scrape; None where no known name is in it."""
    work: list[float] = []
    pending: list[float] = []
    for match in _SAMPLE.finditer(text):
        name = match[1].decode()
        if (tokens := WORK.get(name.removesuffix("_total"))) is not None:
            work.append(float(match[2]) * tokens)
        elif name in PENDING:
            pending.append(float(match[2]))
    return (sum(work) if work else None), (sum(pending) if pending else None)


class Stall:
    """Tells when a server has had requests and done next to nothing for too long. Times are monotonic seconds."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._work: float | None = None
        self._since: float | None = None
        self._silent_since: float | None = None

    def see(self, now_s: float, scrape: tuple[float | None, float | None] | None) -> str | None:
        """Take a look (None: no endpoint answered); return what is wrong, or None."""
        if scrape is None:
            self._silent_since = now_s if self._silent_since is None else self._silent_since
            silent_s = now_s - self._silent_since
            return f"its metrics have not answered for {silent_s:.0f} s" if silent_s >= self._limit_s else None
        self._silent_since = None
        work, pending = scrape
        if not pending or work is None or self._work is None or self._since is None:
            self._work, self._since = work, now_s
            return None
        done = work - self._work
        if done < 0 or done > LEAST_TOK_PER_S * self._limit_s:
            self._work, self._since = work, now_s
            return None
        idle_s = now_s - self._since
        tokens = f"only {done:.0f} tokens in" if done else "no token for"
        return f"{pending:.0f} requests and {tokens} {idle_s:.0f} s" if idle_s >= self._limit_s else None


class Clock:
    """Watches the wall clock against the monotonic one."""

    def __init__(self, wall: Callable[[], float], monotonic: Callable[[], float]) -> None:
        self._wall, self._monotonic = wall, monotonic
        self._first = self._last = wall() - monotonic()
        self.jumps_s: list[float] = []

    def look(self) -> None:
        """Note a jump since the last look; slow slewing is none."""
        offset = self._wall() - self._monotonic()
        if abs(offset - self._last) > CLOCK_JUMP_S:
            self.jumps_s.append(offset - self._last)
        self._last = offset

    def finding(self) -> Finding | None:
        """Return the finding of a run in which the clock jumped."""
        if not self.jumps_s:
            return None
        listed = ", ".join(f"{jump:+.1f} s" for jump in self.jumps_s)
        return Finding(code=Reason.CLOCK_JUMP, detail=f"the node's clock jumped during the replay: {listed}")


class RecordTail:
    """Follows the client's records while they are written."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self._failed_in_a_row: deque[str] = deque(maxlen=STORM)

    def look(self) -> str | None:
        """Read what is new; return the last error once STORM requests in a row have failed, else None."""
        for line in self._new_lines():
            try:
                record = json.loads(line)
            except ValueError:
                continue  # metrics judge unreadable records; here they say neither success nor failure
            if not isinstance(record, dict) or (record.get("metadata") or {}).get("was_cancelled"):
                continue  # the client cancels what still runs at the end of the window
            error = record.get("error")
            if error:
                self._failed_in_a_row.append(error_text(error))
            else:
                self._failed_in_a_row.clear()
        return self._failed_in_a_row[-1] if len(self._failed_in_a_row) == STORM else None

    def _new_lines(self) -> Iterator[bytes]:
        try:
            with self._path.open("rb") as stream:
                stream.seek(self._offset)
                data = stream.read()
        except FileNotFoundError:
            return
        whole, newline, _ = data.rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        yield from whole.splitlines()


def error_text(error: Any) -> str:
    """Return a record's error in one line."""
    if isinstance(error, dict):
        parts = (error.get("code"), error.get("type"), error.get("message"))
        error = " ".join(str(part) for part in parts if part)
    return " ".join(str(error).split())[:300]


class Sampler:
    """Takes one sample after another and appends it to the attempt's files; ends the replay with AttemptFailed."""

    def __init__(self, attempt: Attempt, client: Managed, records: Path) -> None:
        settings = attempt.point.replay
        self._attempt, self._client = attempt, client
        self._interval_s = 1.0 if settings.duration_s <= SHORT_WINDOW_S else 5.0
        self._next_s = 0.0
        self._stall = Stall(min(LONGEST_STALL_S, settings.request_timeout_s))
        self._records = RecordTail(records)
        self.clock = Clock(time.time, time.monotonic)

    def look(self) -> None:
        """Take a sample if it is time; raises AttemptFailed (stalled, error_storm, scratch_full)."""
        # Each time: a tier may write gigabytes between two samples.
        if wrong := scratch.full(self._attempt.scratch, self._attempt.point.plan.scratch):
            # At once: this attempt still writes, and the server it shares with others goes on storing.
            scratch.empty(self._attempt.scratch, self._attempt.point.plan.scratch)
            raise AttemptFailed(FailureClass.SCRATCH_FULL, wrong)
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._interval_s
        self.clock.look()
        problem = self._stall.see(now_s, self._scrape())
        self._sample_node()
        if problem:
            keep_evidence(self._attempt)
            raise AttemptFailed(FailureClass.STALLED, f"the server is stalled: {problem}")
        if error := self._records.look():
            keep_evidence(self._attempt)
            raise AttemptFailed(FailureClass.ERROR_STORM, f"{STORM} requests in a row failed, the last one: {error}")

    def _scrape(self) -> tuple[float | None, float | None] | None:
        """Keep the raw text of every endpoint; return the engine's sums, None if no endpoint of it answered.

        What runs beside the engine tells nothing of it: an engine may hang while its store goes on answering.
        """
        plan = self._attempt.point.plan
        beside = {sidecar.probe.port for sidecar in plan.sidecars}
        found = []
        for port, path in plan.metrics:
            text = endpoints.fetch(self._attempt.url(port, path), timeout_s=5.0)
            if text is None:
                continue
            append_gzip(self._attempt.folder / "metrics" / f"{port}.samples.prom.gz", sample(time.time(), text))
            if port not in beside:
                found.append(totals(text))
        if plan.metrics and not found:
            return None
        work = [one for one, _ in found if one is not None]
        pending = [one for _, one in found if one is not None]
        return (sum(work) if work else None), (sum(pending) if pending else None)

    def _sample_node(self) -> None:
        groups = [*self._attempt.running, self._client]
        line = {
            "unix_s": round(time.time(), 3),
            "rss_bytes": {process.name: resident_bytes(process) for process in groups},
            "available_bytes": psutil.virtual_memory().available,
            "shm_used_bytes": leftovers.used_bytes(),
        }
        with (self._attempt.folder / "node.jsonl").open("a") as stream:
            stream.write(json.dumps(line) + "\n")


def sample(unix_s: float, text: bytes) -> bytes:
    """Return a scrape as it is kept: a comment with its time before it."""
    return b"# sampled at %.3f\n%s" % (unix_s, text if text.endswith(b"\n") else text + b"\n")


def append_gzip(path: Path, data: bytes) -> None:
    """Append data as a member of its own: whatever ends the job, all members before it can be read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as stream:
        stream.write(gzip.compress(data, 6))


def resident_bytes(process: Managed) -> int | None:
    """Return the resident memory of a process and its descendants; shared pages count once a process."""
    try:
        root = psutil.Process(process.popen.pid)
        family = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return None
    total = 0
    for one in family:
        try:
            total += one.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def keep_evidence(attempt: Attempt) -> None:
    """Write what may explain a server that does not work, while it is still there: processes and their stacks."""
    folder = attempt.folder / "evidence"
    folder.mkdir(exist_ok=True)
    lines = []
    tool = shutil.which("py-spy")
    for process in attempt.members():
        try:
            about = [str(process.pid), process.status(), f"{process.num_threads()} threads", *process.cmdline()[:8]]
        except psutil.NoSuchProcess:
            continue
        lines.append(" ".join(about))
        if tool is not None and "python" in " ".join(about):
            with (folder / f"stack.{process.pid}.txt").open("wb") as stream:
                try:
                    subprocess.run(
                        [tool, "dump", "--pid", str(process.pid)], stdout=stream, stderr=stream, timeout=20, check=False
                    )
                except (OSError, subprocess.TimeoutExpired) as error:
                    stream.write(f"py-spy: {error}\n".encode())
    (folder / "processes.txt").write_text("\n".join(lines) + "\n")


def start_power_samples(attempt: Attempt) -> Managed | None:
    """Start the vendor's tool that writes `gpu_metrics.csv`, a row a second and GPU; None without GPUs or tool."""
    tool = nvidia_smi()
    if tool is None or attempt.launcher.vendor != "nvidia":
        return None
    fields = "timestamp,index,power.draw,temperature.gpu,clocks.sm,utilization.gpu,memory.used"
    argv = (*tool, f"--query-gpu={fields}", "--format=csv", "--loop=1")
    return attempt.start("power", Command(argv, {}), log="gpu_metrics.csv")
