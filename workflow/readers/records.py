"""Per-request records of a replay client (JSON lines) as columns.

Two dialects are read: aiperf and agentx-harness (`{"metadata": {...}, "metrics": {...}, "error": ...}`), and the flat
records of a small hand-written client (`{"session", "turn", "start", "ttft", "latency", ...}`, seconds).

A file is read line by line. What is kept of each record goes to columns in a temporary file, so that memory does not
grow with their number.
"""

import json
import math
import multiprocessing
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from workflow.contract import InputError
from workflow.readers.columns import Columns, Scratch

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

# Factor from a unit that a client writes to seconds. The unit in the file wins: perf_analyzer wrote nanoseconds where
# others write milliseconds, and the number alone does not tell.
SECONDS: Mapping[str | None, float] = {
    "ms": 1e-3,
    "s": 1.0,
    "sec": 1.0,
    "seconds": 1.0,
    "us": 1e-6,
    "ns": 1e-9,
    "milliseconds": 1e-3,
    "microseconds": 1e-6,
    "nanoseconds": 1e-9,
    None: 1e-3,
}

# column -> (name of the client's metric, is a time)
METRICS: Mapping[str, tuple[str, bool]] = {
    "ttft_s": ("time_to_first_token", True),
    "e2e_s": ("request_latency", True),
    "itl_s": ("inter_token_latency", True),
    "full_response_itl_s": ("full_response_inter_token_latency", True),
    "input_tokens": ("input_sequence_length", False),
    "output_tokens": ("output_sequence_length", False),
    "cached_tokens": ("usage_prompt_cache_read_tokens", False),
}


# column -> key of the flat dialect
FLAT: Mapping[str, str] = {
    "ttft_s": "ttft",
    "e2e_s": "latency",
    "itl_s": "itl",
    "full_response_itl_s": "full_response_itl",
    "input_tokens": "prompt_tokens",
    "output_tokens": "completion_tokens",
    "cached_tokens": "cached_tokens",
}

ANSWERED: Mapping[str, str] = {
    **dict.fromkeys(("start_ns", "end_ns"), "i8"),
    **dict.fromkeys(("turn", "agent_depth", "session", "conversation"), "i4"),
    **dict.fromkeys(("lag_s", *METRICS), "f8"),
}
UNANSWERED: Mapping[str, str] = {"start_ns": "i8", "end_ns": "i8", "gave_up": "i4"}

READ = tuple((name, 1e-3 if time else 1.0, time) for name, time in METRICS.values())
PLAIN = frozenset((float, int))
LATEST_NS, MOST = 2**61, 2**31

PARALLEL_BYTES = 64_000_000
"""Below this, starting processes costs more than it saves."""

COUNTS = (
    *("warmup", "warmup_failed", "succeeded", "failed", "cancelled", "unreadable", "timed_out"),
    *("dropped_as_warmup", "dropped_as_error"),
)


@dataclass
class Records:
    """One client's records: columns, in file order, and counts."""

    answered: Columns
    """The profiled requests that succeeded. NaN is "not there".

    `start_ns`, `end_ns`; `lag_s`, from the moment the client decided to send to the moment it sent; `turn`,
    `agent_depth`; `session`, a code into `sessions`, and `conversation`, one into `conversations`; and a column for
    each key of METRICS, in seconds or tokens.
    """
    sessions: list[str]
    conversations: list[str]
    unanswered: Columns
    """`start_ns` and `end_ns` of the other profiled requests (failed, cancelled): they load the server too.

    `gave_up` is 1 where the client gave up waiting: no latency holds that wait, and it was among the longest.
    """
    # -- counts in exclusive classes
    warmup: int = 0
    warmup_failed: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    unreadable: int = 0
    repeated: int = 0
    """Profiled lines, answered or not, that repeat the id of another: the client gives every request its own."""
    timed_out: int = 0
    """How many of the failed ones ran into the client's own time-out."""
    # -- InferenceX counts a failed warm-up in both of its buckets; only its own aggregate uses these two
    dropped_as_warmup: int = 0
    dropped_as_error: int = 0
    error_categories: Counter[str] = field(default_factory=Counter)
    profiled_error_categories: Counter[str] = field(default_factory=Counter)
    traces: set[str] = field(default_factory=set)
    """Trace ids that were seen, warm-up included."""
    last_warmup_end_ns: int | None = None
    wall_clock: bool = True
    """False where times count from the client's own start, so that they cannot be laid over the server's."""

    @property
    def total(self) -> int:
        """All lines of the file that were not blank."""
        return self.warmup + self.warmup_failed + self.succeeded + self.failed + self.cancelled + self.unreadable


def read_records(path: Path, processes: int | None = None) -> Records:
    """Read a client's records; a line that is not a record is counted in `unreadable` and skipped.

    A file above PARALLEL_BYTES is read by two processes, each half of it, since parsing JSON is nearly all the work;
    `processes` sets their number. Raises InputError: no such file, no room for temporary files, or a reading process
    that was killed.
    """
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise InputError("no such file", file=path) from None
    if processes is None:
        available = min(2, os.cpu_count() or 1) if hasattr(os, "fork") else 1
        processes = available if size >= PARALLEL_BYTES else 1
    cuts = [size * part // processes for part in range(processes + 1)]
    # fork, not spawn: a spawned process imports the caller's main module again, and a script has no guard there.
    fork = multiprocessing.get_context("fork") if processes > 1 else multiprocessing.get_context()
    others = []
    for start, stop in pairwise(cuts[1:]):
        here, there = fork.Pipe(duplex=False)
        part = _Table()
        other = fork.Process(target=_send_part, args=(part, path, start, stop, there), daemon=True)
        other.start()
        there.close()
        others.append((other, part, here))
    table = _Table()
    table.fill(path, cuts[0], cuts[1])
    for other, part, here in others:
        try:
            sent = here.recv()
        except EOFError:
            raise InputError(
                "a process that read a part of it was killed", file=path, do="try again where there is more memory"
            ) from None
        if isinstance(sent, InputError):
            raise sent
        part.receive(sent)
        other.join()
        here.close()
        table.append(part)
    return table.finish()


def _send_part(table: "_Table", path: Path, start: int, stop: int, out: Connection) -> None:
    """Fill a table in a process of its own. Its columns go into the file that the reader of `out` has open as well."""
    try:
        table.fill(path, start, stop)
        out.send(table.sent())
    except InputError as error:
        out.send(error)


def error_category(error: Any) -> str:
    """Return InferenceX's category of a record's error: the first filled field of five, else the message's head."""
    if isinstance(error, Mapping):
        for key in ("type", "error_type", "code", "class", "status"):
            if error.get(key):
                return str(error[key])
        error = error.get("message") or "unknown"
    return str(error).split(":", 1)[0].strip()[:120] or "unknown"


_GAVE_UP = re.compile(r"(?i)time[sd]?[ _-]?out|deadline")


def is_timeout(error: Any) -> bool:
    """Say whether the client gave up waiting. An answer with a status (408, 504) is the server's error."""
    if isinstance(error, Mapping):
        if error.get("code"):
            return False
        error = error.get("type") or error.get("error_type") or error.get("message")
    return _GAVE_UP.search(str(error)) is not None


def number(value: Any) -> float:
    """Return a number from a record as float: NaN for null, for text without a number and for NaN or infinity as text.

    `"15,559.05"` is fifteen thousand: a reader that takes the comma for a separator makes it 15 or 0.
    """
    if isinstance(value, bool) or value is None:
        return math.nan
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, str):
        try:
            return float(value.replace(",", ""))
        except ValueError:
            return math.nan
    return math.nan


def _lines(path: Path, start: int, stop: int) -> Iterator[bytes]:
    with path.open("rb", buffering=1 << 20) as stream:
        at = start
        if start > 0:
            # A line belongs to the part in which it begins: step back one byte and skip the rest of that line.
            stream.seek(start - 1)
            at = start - 1 + len(stream.readline())
        for line in stream:
            if at >= stop:
                return
            at += len(line)
            if not line.isspace():
                yield line


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        data = orjson.loads(line)
    except ValueError:
        try:
            # Python's own parser takes bare NaN and Infinity, which several clients write although JSON has neither.
            data = json.loads(line)
        except ValueError:
            return None
    return data if isinstance(data, dict) else None


@dataclass
class _Rest:
    """What a part of a file says beside its columns; small, whatever the number of records."""

    counts: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    profiled_errors: Counter[str] = field(default_factory=Counter)
    traces: set[str] = field(default_factory=set)
    sessions: dict[str, int] = field(default_factory=dict)
    conversations: dict[str, int] = field(default_factory=dict)
    last_warmup_end: int | None = None
    wall_clock: bool = True


class _Table(_Rest):
    """What the lines of a part of a file say."""

    def __init__(self) -> None:
        super().__init__()
        scratch = Scratch()
        self.answered, self.unanswered = Columns(ANSWERED, scratch), Columns(UNANSWERED, scratch)
        self.keys = Columns({"key": "i8"}, scratch)

    def fill(self, path: Path, start: int, stop: int) -> None:
        """Read the records whose lines begin in [start, stop)."""
        for line in _lines(path, start, stop):
            self.add(line)
        for columns in self._columns():
            columns.flush()

    def _columns(self) -> tuple[Columns, ...]:
        return self.answered, self.unanswered, self.keys

    def sent(self) -> tuple[_Rest, list[list[tuple[int, int]]]]:
        """Return what a process that has the same file needs to make the table whole."""
        rest = _Rest(**{name: getattr(self, name) for name in _Rest.__dataclass_fields__})
        return rest, [columns.written() for columns in self._columns()]

    def receive(self, sent: tuple[_Rest, list[list[tuple[int, int]]]]) -> None:
        """Become the table that was sent."""
        rest, written = sent
        for name in _Rest.__dataclass_fields__:
            setattr(self, name, getattr(rest, name))
        for columns, blocks in zip(self._columns(), written, strict=True):
            columns.find(blocks)

    def append(self, other: "_Table") -> None:
        """Put the next part of the same file behind this one."""
        other.answered.recode("session", _codes(other.sessions, self.sessions))
        other.answered.recode("conversation", _codes(other.conversations, self.conversations))
        for columns, behind in zip(self._columns(), other._columns(), strict=True):
            columns.append(behind)
        self.counts += other.counts
        self.errors += other.errors
        self.profiled_errors += other.profiled_errors
        self.traces |= other.traces
        self.wall_clock = self.wall_clock and other.wall_clock
        ends = [end for end in (self.last_warmup_end, other.last_warmup_end) if end is not None]
        self.last_warmup_end = max(ends, default=None)

    def add(self, line: bytes) -> None:
        data = _parse(line)
        if data is None:
            self.counts["unreadable"] += 1
            return
        metadata = data.get("metadata")
        try:
            if isinstance(metadata, dict):
                self._client_record(data, metadata)
            elif "session" in data and ("latency" in data or "error" in data):
                self._flat_record(data)
            else:
                self.counts["unreadable"] += 1
        except (TypeError, ValueError, KeyError):
            self.counts["unreadable"] += 1

    def _client_record(self, data: dict[str, Any], metadata: dict[str, Any]) -> None:
        start, end = int(metadata["request_start_ns"]), int(metadata["request_end_ns"])
        if not (-LATEST_NS < start < LATEST_NS and -LATEST_NS < end < LATEST_NS):
            raise ValueError("a time is too large for its column")
        error = data.get("error")
        conversation = str(metadata.get("conversation_id", ""))
        warmup = metadata.get("benchmark_phase", "profiling") != "profiling"
        if error:
            self.counts["dropped_as_error"] += 1
            self.errors[error_category(error)] += 1
        if warmup:
            self.counts["dropped_as_warmup"] += 1
            self.counts["warmup_failed" if error or metadata.get("was_cancelled") else "warmup"] += 1
            self.last_warmup_end = max(end, self.last_warmup_end or end)
        elif error or metadata.get("was_cancelled") or metadata.get("context_overflow_skip"):
            self._key(metadata)
            self._unanswered(start, end, error, cancelled=bool(metadata.get("was_cancelled")))
        else:
            self._key(metadata)
            row = self._values(data.get("metrics") or {})
            turn, depth = int(metadata.get("turn_index") or 0), int(metadata.get("agent_depth") or 0)
            credit = metadata.get("credit_issued_ns")
            lag = (start - credit) / 1e9 if credit else math.nan
            root = (
                metadata.get("root_correlation_id") or metadata.get("x_correlation_id") or metadata.get("session_num")
            )
            self._answered(row, (start, end, turn, depth), lag, (str(root), conversation))
        self.traces.add(str(metadata.get("source_trace_id") or conversation.partition("::")[0]))

    def _key(self, metadata: dict[str, Any]) -> None:
        identity = metadata.get("x_request_id")
        if identity is not None:
            self.keys.add(hash(identity))

    def _values(self, metrics: dict[str, Any]) -> list[float]:
        row = []
        for name, scale, time in READ:
            value: Any = metrics.get(name)
            if type(value) is dict:
                if time and (unit := value.get("unit")) != "ms":
                    scale = SECONDS[unit]  # noqa: PLW2901
                value = value.get("value")
            row.append(value * scale if type(value) in PLAIN else number(value) * scale)
        return row

    def _flat_record(self, data: dict[str, Any]) -> None:
        self.wall_clock = False
        session = str(data["session"])
        start_s, latency_s = number(data.get("start")), number(data.get("latency"))
        if abs(start_s) > LATEST_NS / 1e9 or abs(latency_s) > LATEST_NS / 1e9:
            raise ValueError("a time is too large for its column")
        start = round(start_s * 1e9) if math.isfinite(start_s) else None
        if data.get("error"):
            self.counts["dropped_as_error"] += 1
            self.errors[error_category(data["error"])] += 1
            end = start + round(latency_s * 1e9) if start is not None and math.isfinite(latency_s) else start
            self._unanswered(start, end, data["error"], cancelled=False)
            return
        if start is None:
            raise ValueError("an answered request has a start")
        end = start + (round(latency_s * 1e9) if math.isfinite(latency_s) else 0)
        row = [number(data.get(FLAT[column])) for column in METRICS]
        self._answered(row, (start, end, int(data.get("turn") or 0), 0), math.nan, (session, session))

    def _unanswered(self, start: int | None, end: int | None, error: Any, *, cancelled: bool) -> None:
        self.counts["cancelled" if cancelled else "failed"] += 1
        if not cancelled:
            self.profiled_errors[error_category(error) if error else "context_overflow_skip"] += 1
        gave_up = not cancelled and is_timeout(error)
        self.counts["timed_out"] += gave_up
        if start is not None and end is not None:
            self.unanswered.add(start, end, gave_up)

    def _answered(
        self, row: list[float], numbers: tuple[int, int, int, int], lag: float, names: tuple[str, str]
    ) -> None:
        start, end, turn, depth = numbers
        if max(abs(turn), abs(depth)) >= MOST:
            raise ValueError("a number is too large for its column")
        session = self.sessions.setdefault(names[0], len(self.sessions))
        conversation = self.conversations.setdefault(names[1], len(self.conversations))
        self.answered.add(start, end, turn, depth, session, conversation, lag, *row)
        self.counts["succeeded"] += 1

    def finish(self) -> Records:
        return Records(
            answered=self.answered,
            unanswered=self.unanswered,
            repeated=_repeated(self.keys),
            sessions=list(self.sessions),
            conversations=list(self.conversations),
            **{name: self.counts[name] for name in COUNTS},
            error_categories=self.errors,
            profiled_error_categories=self.profiled_errors,
            traces=self.traces,
            last_warmup_end_ns=self.last_warmup_end,
            wall_clock=self.wall_clock,
        )


def _repeated(keys: Columns) -> int:
    """Count the keys that are there already."""
    ordered = keys["key"]
    ordered.sort()
    return int(np.count_nonzero(ordered[1:] == ordered[:-1]))


def _codes(names: Mapping[str, int], known: dict[str, int]) -> npt.NDArray[np.int32]:
    """Return, for each code into `names`, the code into `known`, which learns the new names."""
    return np.array([known.setdefault(name, len(known)) for name in names], dtype=np.int32)
