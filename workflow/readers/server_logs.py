"""What only the engines' and stores' logs say: llama.cpp's prompt sources, pool sizes, degradation warnings."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_STAMP = re.compile(r"^(\d+)\.(\d{2})\.(\d{3})\.(\d{3}) ")
_CLOCK = re.compile(r"log clock starts at (\d+(?:\.\d+)?)")
_TASK = re.compile(r"launch_slot_: id\s+(\d+) \| task (\d+) \| processing task")
_PROMPT = re.compile(r"id\s+\d+ \| task (\d+) \| new prompt,.*task\.n_tokens = (\d+)")
_CACHED = re.compile(r"id\s+\d+ \| task (\d+) \| cached n_tokens = (\d+)")
_FILL = re.compile(r"cache state: \d+ prompts, ([\d.]+) MiB \(limits: ([\d.]+) MiB")
_POOL = re.compile(r"GPU KV cache size: ([\d,]+) tokens")
_ENGINE_TAG = re.compile(r"\((EngineCore[^)]*)\)")
_VERSION = re.compile(r"(?:LLM engine|vLLM API server version|version)\s*\(?v?(\d+\.\d+\.\d+\S*?)[)\s,]")

MIB = 1024.0**2
CLOCK_ERROR_S = 1.0
"""More than the launcher needs between printing its time and loading the engine's library."""

# Log lines of a store that runs but does not do its work.
BROKEN: tuple[tuple[str, str], ...] = (
    (r"Cannot store blocks", "the host pool refused to store blocks"),
    (r"Pin budget: 0 tokens", "HiCache may pin nothing"),
    (r"\bblock I/O failed: ", "the file tier could not write or read blocks"),
    (r"OUT_OF_MEMORY.*skip|skip\w* store", "the store was full and skipped stores"),
)
# Log lines that explain a low hit share but also appear in runs that worked.
SUSPECT: tuple[tuple[str, str], ...] = (
    (r"Session .* not found, skipping touch", "LMCache lost a session"),
    (r"Insufficient /dev/shm capacity", "shared memory was too small for the pool"),
    (r"(?:cuda|hip)HostRegister failed", "host memory could not be pinned, so copies were slow"),
    (
        r"TcpTransport: I/O pool started with 1 thread\b",
        "Mooncake moves all blocks over TCP with one I/O thread (MC_NUM_TCP_IO_THREADS is not set)",
    ),
    (
        r"Store segment pinned memory is disabled",
        "Mooncake's memory is not pinned (MC_STORE_PIN_MEMORY_MAX_BYTES is 0)",
    ),
    (
        r"Registered KV caches: num_groups=1, num_segments=(?!1\b)\d+",
        "Mooncake copies each block in pieces, one a layer: cross-layer blocks are off, or this model runner has none",
    ),
    (
        r"compiled extension not found; \w+ stays on the torch baseline",
        "LMCache's compiled kernels do not load with this torch: the wheel was built for another one",
    ),
)
# Said when memory, or a part of it, has been pinned. It may be said behind the first request: then early copies were
# slow. vLLM says it as a debug message or, where it pins in the background, as information; LMCache for each piece.
_PINNED = re.compile(
    r"Completed CPU memory pinning|Host-registered mmap region|cudaHostRegister (?:rank=\d+|pin) [\d.]+ GB|"
    r"LazyMemoryAllocator: Expanded \d+ MB pinned memory"
)
# An engine that answers; a store's server that is asked.
_WORK = re.compile(r'"POST /v1/|Avg prompt throughput: (?!0\.0 )|Stored \d+ tokens in |Prefetch request completed')
PINNED_LATE = "host memory was still being pinned when requests came, so the first copies were slow"
_WARNING = re.compile("|".join(f"(?:{pattern})" for pattern, _ in BROKEN + SUSPECT))


@dataclass
class PromptSources:
    """Where llama.cpp took prompt tokens from, over the tasks that started inside a window."""

    device: int = 0
    host: int = 0
    computed: int = 0
    tasks: int = 0

    @property
    def prompt(self) -> int:
        """All prompt tokens."""
        return self.device + self.host + self.computed


@dataclass
class EngineLog:
    """One service's log."""

    pool_tokens: int | None = None
    """Device KV pool in tokens: the last value of each engine rank, summed over ranks."""
    pool_lines: list[tuple[str, int]] = field(default_factory=list)
    """Each line that names a pool size: (tag of the engine process or "", tokens)."""
    starts: int = 0
    """How many times a pool was set up per engine: more than once is a restart."""
    clock_start_s: float | None = None
    """Unix time at which the log's own stamps begin, where the launcher printed it."""
    tasks: list[tuple[float, int, int, bool]] = field(default_factory=list)
    """llama.cpp: (seconds since the log's start, prompt tokens, cached tokens, restored from the host cache)."""
    saved_to_host: int = 0
    """llama.cpp: prompts that were saved to the host cache."""
    restored_from_host: int = 0
    host_used_bytes: float | None = None
    """llama.cpp: highest fill of the host cache."""
    host_limit_bytes: float | None = None
    verbose: bool = False
    """llama.cpp: the log has the lines that the split needs (verbosity 4 or more)."""
    broken: Counter[str] = field(default_factory=Counter)
    """Lines of the table BROKEN."""
    suspect: Counter[str] = field(default_factory=Counter)

    def sources(self, start_s: float, end_s: float, sent: Sequence[tuple[float, int]] = ()) -> PromptSources | None:
        """Sum prompt tokens by source over tasks launched in a wall-clock window; None where the log cannot say.

        `sent` holds (time sent, prompt tokens) of requests on the same clock; it mends the log's clock, see `ahead_s`.
        """
        if self.clock_start_s is None or not self.verbose:
            return None
        found = PromptSources()
        clock = self.clock_start_s + self.ahead_s(sent)
        for at, prompt, cached, restored in self.tasks:
            if start_s <= clock + at < end_s:
                found.tasks += 1
                found.computed += prompt - cached
                if restored:
                    found.host += cached
                else:
                    found.device += cached
        return found

    def ahead_s(self, sent: Sequence[tuple[float, int]]) -> float:
        """Return by how many seconds the log's stamps are too early, going by requests that can be told apart.

        The launcher prints its time shortly before the engine's clock starts, and a replay sends its first requests
        at the window's very start: without this they would seem to lie before it. No task starts before its request
        was sent, so the earliest pair that contradicts this gives the error.
        """
        times: dict[int, list[float]] = {}
        for at, prompt in sent:
            times.setdefault(prompt, []).append(at)
        errors = [0.0]
        for at, prompt, _, _ in self.tasks:
            wall = (self.clock_start_s or 0.0) + at
            near = [one for one in times.get(prompt, ()) if abs(one - wall) < CLOCK_ERROR_S]
            if len(near) == 1:
                errors.append(near[0] - wall)
        return max(errors)


def read_engine_log(path: Path) -> EngineLog:
    """Read a service's log line by line; undecodable bytes are replaced, never fatal."""
    reader = _LogReader()
    with path.open(errors="replace") as stream:
        for line in stream:
            reader.add(line)
    return reader.finish()


class _LogReader:
    def __init__(self) -> None:
        self.log = EngineLog()
        self.restored = self.worked = False
        self.prompts: dict[int, int] = {}
        self.launched: dict[int, tuple[float, bool]] = {}

    def add(self, line: str) -> None:
        if "log clock starts at" in line and (clock := _CLOCK.search(line)):
            self.log.clock_start_s = float(clock[1])
        elif "GPU KV cache size" in line and (pool := _POOL.search(line)):
            tag = _ENGINE_TAG.search(line)
            self.log.pool_lines.append((tag[1] if tag else "", int(pool[1].replace(",", ""))))
        elif " slot " in line or " srv " in line:
            self._llamacpp(line)
        if self.worked:
            if _PINNED.search(line):
                self.log.suspect[PINNED_LATE] += 1
        elif _WORK.search(line):
            self.worked = True
        if _WARNING.search(line):
            self.log.broken.update(says for pattern, says in BROKEN if re.search(pattern, line))
            self.log.suspect.update(says for pattern, says in SUSPECT if re.search(pattern, line))

    def _llamacpp(self, line: str) -> None:
        """Follow one request: cache looked through, prompt restored or not, task launched, cached tokens counted."""
        if "updating prompt cache" in line:
            self.restored = False
        elif "found better prompt with f_keep" in line:
            self.restored = True
            self.log.restored_from_host += 1
        elif fill := _FILL.search(line):
            self.log.host_used_bytes = max(float(fill[1]) * MIB, self.log.host_used_bytes or 0.0)
            self.log.host_limit_bytes = float(fill[2]) * MIB
        elif "saving prompt with length" in line:
            self.log.saved_to_host += 1
        elif task := _TASK.search(line):
            self.launched[int(task[2])] = (_seconds(line), self.restored)
            self.restored = False
        elif prompt := _PROMPT.search(line):
            self.prompts[int(prompt[1])] = int(prompt[2])
        elif cached := _CACHED.search(line):
            self.log.verbose = True
            number = int(cached[1])
            if number in self.launched and number in self.prompts:
                at, restored = self.launched.pop(number)
                # A long prompt is processed in several batches and prints the line for each: the first counts.
                self.log.tasks.append((at, self.prompts.pop(number), int(cached[2]), restored))

    def finish(self) -> EngineLog:
        # A restarted engine has another pid, so the rank alone tells whose line replaces whose. Lines without a tag
        # come from one engine: adding them up would double the pool at a restart.
        ranks: dict[str, list[int]] = {}
        for tag, tokens in self.log.pool_lines:
            ranks.setdefault(tag.split(" pid=")[0], []).append(tokens)
        tagged = {rank: sizes for rank, sizes in ranks.items() if rank} or ranks
        if tagged:
            self.log.pool_tokens = sum(sizes[-1] for sizes in tagged.values())
            self.log.starts = max(len(sizes) for sizes in tagged.values())
        return self.log


def _seconds(line: str) -> float:
    stamp = _STAMP.match(line)
    if stamp is None:
        return 0.0
    minutes, seconds, milli, micro = (int(part) for part in stamp.groups())
    return minutes * 60 + seconds + milli / 1e3 + micro / 1e6


def log_files(folder: Path) -> Iterator[Path]:
    """Yield the logs of an attempt, the engine's first."""
    names = ("engine.log", "server.log", "vllm.log")
    first = [folder / name for name in names if (folder / name).is_file()]
    yield from first
    yield from sorted(path for path in folder.glob("*.log") if path not in first and path.name != "console.log")
