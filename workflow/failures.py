"""Evidence -> the class of a failed attempt and its first cause. Pure, except for writing the record."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from workflow.contract import Document


class FailureClass(StrEnum):
    """Why an attempt left nothing to measure. The class decides whether another try is worth its cost."""

    CONFIGURATION = "configuration"
    VERSION_MISMATCH = "version_mismatch"
    ENGINE_NOT_READY = "engine_not_ready"
    ENGINE_DIED = "engine_died"
    ENGINE_BUG = "engine_bug"
    SIDECAR_DIED = "sidecar_died"
    STALLED = "stalled"
    ERROR_STORM = "error_storm"
    CLIENT_FAILED = "client_failed"
    OUT_OF_TIME = "out_of_time"
    INTERRUPTED = "interrupted"
    ALREADY_RUNNING = "already_running"
    TIME_LIMIT = "time_limit"
    OUT_OF_MEMORY = "out_of_memory"
    CANCELLED = "cancelled"
    NODE_FAILURE = "node_failure"
    PREEMPTED = "preempted"
    SUBMIT_REFUSED = "submit_refused"
    IMAGE_PULL = "image_pull"
    NODE_UNFIT = "node_unfit"
    OUTPUT_NOT_WRITTEN = "output_not_written"
    SCRATCH_FULL = "scratch_full"
    UNKNOWN = "unknown"


# What each class means; docs/failures.md is made of it.
MEANING: Mapping[FailureClass, str] = {
    FailureClass.CONFIGURATION: "A part is missing or does not fit; the same again cannot work.",
    FailureClass.VERSION_MISMATCH: "Another version serves than the search space declares.",
    FailureClass.ENGINE_NOT_READY: "A service did not get ready in its time, or answered a probe without a token.",
    FailureClass.ENGINE_DIED: "The engine ended by itself or was killed.",
    FailureClass.ENGINE_BUG: "A known defect of this version of an engine or store; the same again meets it again.",
    FailureClass.SIDECAR_DIED: "A store or router beside the engine ended.",
    FailureClass.STALLED: "The server was healthy, had requests and gave next to no token.",
    FailureClass.ERROR_STORM: "Request after request failed.",
    FailureClass.CLIENT_FAILED: "The replay client left no summary, or one without a successful request.",
    FailureClass.OUT_OF_TIME: "The replay client ran longer than warm-up, window and drain may take.",
    FailureClass.INTERRUPTED: "A signal, or the end of the process that started the job.",
    FailureClass.ALREADY_RUNNING: "Another job measures this point right now; its id is in the message.",
    FailureClass.TIME_LIMIT: "The scheduler ended the job at its time limit; the next try asks for more.",
    FailureClass.OUT_OF_MEMORY: "The job, or the engine in it, took more host memory than was asked for.",
    FailureClass.CANCELLED: "Somebody cancelled the job, and it was not this sweep's own Ctrl-C.",
    FailureClass.NODE_FAILURE: "The scheduler lost the node.",
    FailureClass.PREEMPTED: "The scheduler gave the node to another job.",
    FailureClass.SUBMIT_REFUSED: "The scheduler did not take the job: a partition, account, QOS or limit does not fit.",
    FailureClass.IMAGE_PULL: "The container image could not be fetched.",
    FailureClass.NODE_UNFIT: "Something on this node is in the way: shared memory, a network rail, a GPU.",
    FailureClass.OUTPUT_NOT_WRITTEN: "A file could not be written: a full disk, a quota, a missing permission.",
    FailureClass.SCRATCH_FULL: "A backend's file tier has filled its disk: it has no limit of its own.",
    FailureClass.UNKNOWN: "None of the above; the logs and the first cause are kept all the same.",
}


WORTH_RETRYING = frozenset(
    {
        FailureClass.ENGINE_NOT_READY,
        FailureClass.ENGINE_DIED,
        FailureClass.SIDECAR_DIED,
        FailureClass.STALLED,
        FailureClass.ERROR_STORM,
        FailureClass.CLIENT_FAILED,
        FailureClass.OUT_OF_TIME,
        FailureClass.INTERRUPTED,
        FailureClass.TIME_LIMIT,
        FailureClass.OUT_OF_MEMORY,
        FailureClass.CANCELLED,
        FailureClass.NODE_FAILURE,
        FailureClass.PREEMPTED,
        FailureClass.IMAGE_PULL,
        FailureClass.NODE_UNFIT,
        FailureClass.UNKNOWN,
    }
)


class Failure(Document):
    """One failed attempt, kept in results/failures/ outside of every declared output."""

    point: str
    attempt: str
    failure_class: FailureClass
    message: str
    first_cause: str | None
    """The first error in the logs of the services; what the client reports last is only a symptom."""
    worth_retrying: bool
    unix_s: float
    logs: tuple[str, ...]
    seen_as: FailureClass | None = None
    """What the attempt itself saw, before the logs said more."""
    known_as: str | None = None
    """The known fault whose line is in the logs: what it is and what to do."""


class AttemptFailed(Exception):
    """Ends an attempt with a class and a message."""

    def __init__(self, failure_class: FailureClass, message: str) -> None:
        self.failure_class, self.message = failure_class, message
        super().__init__(message)


@dataclass(frozen=True)
class Signature:
    """A line of a log that names a fault better than the way the attempt ended."""

    pattern: re.Pattern[str]
    failure_class: FailureClass
    says: str


def _s(pattern: str, failure_class: FailureClass, says: str) -> Signature:
    return Signature(re.compile(pattern), failure_class, says)


_C = FailureClass
# The order counts: the first signature in the list that is in any log wins, so the particular come before the general.
SIGNATURES: tuple[Signature, ...] = (
    _s(
        r"register_kv_caches.*cudaErrorInvalidValue|cudaErrorInvalidValue.*register_kv_caches",
        _C.CONFIGURATION,
        "GPU memory from cuMem cannot be shared with LMCache's server; turn expandable segments and sleep mode off",
    ),
    _s(
        r"hipErrorInvalidDevicePointer",
        _C.CONFIGURATION,
        "LMCache's host pool is too large for this GPU's inter-process handles; make it smaller",
    ),
    _s(
        r"finish read on non-read-locked key",
        _C.CONFIGURATION,
        "an LMCache read lease ran out; raise its time to live above the longest request",
    ),
    _s(
        r"(?i)(ops compiled extension not found|No module named '?lmcache\.(c|cuda)_ops)",
        _C.CONFIGURATION,
        "LMCache has no compiled kernels for this build; install the wheel that fits the image's torch",
    ),
    _s(
        r"ImportError: lib(ibverbs|numa|curl|cudart)[\w.\-]*\.so",
        _C.CONFIGURATION,
        "a system library that the backend needs is missing in the image; install it there",
    ),
    _s(
        r"assert not req_status\.transfer_jobs",
        _C.ENGINE_BUG,
        "vLLM admitted a preempted request again while its blocks were still copied; it needs a version that waits",
    ),
    _s(
        r"popleft_n|update_state_after_alloc",
        _C.ENGINE_BUG,
        "the scheduler of vLLM's offload connector fails an assertion; it needs another version, or no eager mode",
    ),
    _s(
        r"IsolatedLRU.*(Error|Exception)|(Error|Exception).*IsolatedLRU",
        _C.ENGINE_BUG,
        "LMCache's IsolatedLRU kills its eviction thread at the first watermark; use LRU",
    ),
    _s(
        r"Pin budget: 0 tokens",
        _C.CONFIGURATION,
        "the host cache sees no memory to pin in this container; give it the memory limit of the job",
    ),
    _s(
        r"Pre-permute function for flashinfer to triton is not registered",
        _C.CONFIGURATION,
        "SGLang's draft model cannot use this MoE backend; name another one",
    ),
    _s(
        r"(?i)illegal memory access.*(load|kv)|kv load fail.*policy.*fail",
        _C.CONFIGURATION,
        "a KV load failed and the policy was to fail; let the engine recompute instead",
    ),
    _s(
        r"(?i)chunk.?size.*(multiple|divisible).*block|block.?size.*(multiple|divisible).*chunk",
        _C.CONFIGURATION,
        "the store's chunk has to be a multiple of the engine's block",
    ),
    _s(
        # vLLM's file tier; it goes on without storing.
        r"block I/O failed: \[Errno (28|122)\]",
        _C.SCRATCH_FULL,
        "the file tier filled its disk: name a larger one as the cluster's `scratch`, or ask for fewer sessions",
    ),
    _s(
        r"(?i)madvise.*(EFAULT|Bad address)|/dev/shm.*(Bad address|Insufficient|No space)|"
        r"(Bad address|Insufficient (space|/dev/shm)|No space left).*(/dev/shm|shm)|Insufficient /dev/shm capacity",
        _C.NODE_UNFIT,
        "the offload region does not fit into /dev/shm: it is too small, or a killed server's file fills it",
    ),
    _s(
        r"(?i)\b0 HCAs? found|no (active )?(RDMA|HCA) device|HCA.*(not found|down)",
        _C.NODE_UNFIT,
        "no RDMA device of the node is up",
    ),
    _s(
        r"(?i)\bXid \(|uncorrectable ECC|GPU has fallen off the bus|CUDA error: (system not yet init|unknown error)",
        _C.NODE_UNFIT,
        "a GPU of the node is in a bad state",
    ),
    _s(r"(?i)address already in use|bind.*\b(98|EADDRINUSE)\b", _C.NODE_UNFIT, "another process took the port first"),
    _s(
        r"(?i)cudaHostRegister.*(fail|error|invalid)|cudaHostAlloc.*(fail|error)|fail\w* to pin.*memory",
        _C.CONFIGURATION,
        "host memory could not be pinned: the locked-memory limit, or more than 512 GiB in one piece",
    ),
    _s(
        r"(?i)oom-kill|Out of memory: Killed process|oom_kill event",
        _C.OUT_OF_MEMORY,
        "the kernel killed a process for the node's or the job's memory",
    ),
    _s(
        r"To serve at least one request with the model's max seq len .* larger than the available KV cache",
        _C.CONFIGURATION,
        "the longest request that is allowed does not fit into the device's KV cache; lower --max-model-len",
    ),
    _s(
        r"(?i)cudaErrorMemoryAllocation|CUDA out of memory|OutOfMemoryError|hipErrorOutOfMemory",
        _C.CONFIGURATION,
        "the GPU's memory is not enough for model, cache and pool as declared",
    ),
    _s(
        r"(?i)aufs whiteout|enroot.*File already exists|pyxis: .*(failed|couldn't)|manifest unknown|toomanyrequests",
        _C.IMAGE_PULL,
        "the container image could not be fetched or unpacked",
    ),
    _s(
        r"The model `?[^`\n]*`? does not exist|NotFoundError.*model",
        _C.CONFIGURATION,
        "requests name another model than the server serves",
    ),
    _s(
        r"(?i)Configure Profiling.*time|timed out.*Configure Profiling",
        _C.OUT_OF_TIME,
        "the client's dataset took too long to build; the second time it is there",
    ),
    _s(
        r"(?i)\bwatchdog timeout",
        _C.STALLED,
        "the engine's own watchdog ended a scheduler that made no progress",
    ),
    _s(
        r"action=client_expired",
        _C.SIDECAR_DIED,
        "the Mooncake master dropped a client; one master serves one point",
    ),
)

# What a signature may sharpen. What a person or the scheduler did is known better than any log can say.
_SHARPENED = frozenset(
    {
        _C.ENGINE_NOT_READY,
        _C.ENGINE_DIED,
        _C.SIDECAR_DIED,
        _C.STALLED,
        _C.ERROR_STORM,
        _C.CLIENT_FAILED,
        _C.OUT_OF_TIME,
        _C.UNKNOWN,
    }
)

_FILLED_BY_A_TIER = (_C.OUTPUT_NOT_WRITTEN, _C.SCRATCH_FULL)


@dataclass(frozen=True)
class Diagnosis:
    """What the logs of a failed attempt say."""

    failure_class: FailureClass
    first_cause: str | None
    known_as: str | None


# `(EngineCore_0 pid=12) ERROR 12-01 06:49:13 [core.py:708] ` before the text, in any part.
_PREFIX = re.compile(
    r"^(\([^()]*pid=\d+[^()]*\)\s*)?(\[?\d{4}-\d\d-\d\d[ T][\d:.,]+\]?\s*)?"
    r"((DEBUG|INFO|WARNING|ERROR|CRITICAL)\s+\d\d-\d\d [\d:.]+\s+\[[^\]]+\] ?)?(\[[^\]]*(TP|DP|EP|rank)\d+[^\]]*\] ?)?"
)
_TRACEBACK = re.compile(r"^Traceback \(most recent call last\):")
_RAISED = re.compile(r"^(?!(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\b)[A-Za-z_][\w.]*(?:: .*|$)")
_ERROR = re.compile(r"\b(error|fatal|abort\w*|exception|out of memory|killed|cannot|failed)\b", re.IGNORECASE)
_HARMLESS = re.compile(
    # An advice against an error that did not happen, too: "this can cause errors like `OSError: ...`".
    r"\b(0|no|without) (errors?|failed)\b|errors?[=:] ?0\b|\bcan cause\b",
    re.IGNORECASE,
)
# A shutdown is logged as information with the word abort in it.
_MILD = re.compile(r"^(\([^()]*pid=\d+[^()]*\)\s*)?(DEBUG|INFO)\b")
# A line of Google's logging library that only informs: Mooncake's master counts its failed requests in one, all zero.
_INFORMS = re.compile(r"I\d{4} \d\d:\d\d:\d\d")


def _harmless(line: str) -> bool:
    return bool(_HARMLESS.search(line) or _MILD.match(line) or _INFORMS.match(line))


def first_cause(log: Iterable[str]) -> str | None:
    """Return the exception of the first Python traceback in a log, else the first line that speaks of an error."""
    trace, error = _causes(log)
    return trace or error


def _causes(log: Iterable[str]) -> tuple[str | None, str | None]:
    """Return (exception of the first traceback, first line that speaks of an error)."""
    inside = False
    first_error: str | None = None
    for raw in log:
        line = raw.rstrip()
        text = _PREFIX.sub("", line)
        if _TRACEBACK.search(text):
            inside = True
        elif inside and _RAISED.match(text):
            return text.strip(), first_error
        elif not inside and first_error is None and _ERROR.search(line) and not _harmless(line):
            first_error = line.strip()
    return None, first_error


def diagnose(seen_as: FailureClass, services: Sequence[Path], client: Path) -> Diagnosis:
    """Return the class and the first cause of a failed attempt from its logs, in the order its services started.

    The first traceback of a service counts, then the first error line of one, and only then what the client says: it
    reports a dead server as thousands of errors of its own.
    """
    texts = {log: log.read_text(errors="replace") for log in (*services, client) if log.is_file()}
    causes = {log: _causes(text.splitlines()) for log, text in texts.items()}
    ordered = [causes[log][0] for log in services if log in causes]
    ordered += [causes[log][1] for log in services if log in causes]
    ordered += list(causes.get(client, ()))
    cause = next((one for one in ordered if one), None)
    # A disk that is full for us was filled by somebody; other lines have nothing to do with it.
    told = [one for one in SIGNATURES if seen_as in _SHARPENED or (seen_as, one.failure_class) == _FILLED_BY_A_TIER]
    for signature in told:
        if any(signature.pattern.search(line) for text in texts.values() for line in text.splitlines()):
            return Diagnosis(signature.failure_class, cause, signature.says)
    return Diagnosis(seen_as, cause, None)


def last_failure(folder: Path, point: str) -> Failure | None:
    """Return the newest record of a point's failures, or None."""
    records = [Failure.read(path) for path in folder.glob(f"{point}.*.json")]
    return max(records, key=lambda record: record.unix_s, default=None)


def classes_table() -> str:
    """Return the table of classes for docs/failures.md."""
    lines = ["| class | what it means | tried again |", "|---|---|---|"]
    lines += [f"| `{one}` | {MEANING[one]} | {'yes' if one in WORTH_RETRYING else 'no'} |" for one in FailureClass]
    return "\n".join(lines)


def known_table() -> str:
    """Return the table of known faults for docs/failures.md."""
    lines = ["| known fault | class |", "|---|---|"]
    lines += [f"| {one.says[0].upper()}{one.says[1:]} | `{one.failure_class}` |" for one in SIGNATURES]
    return "\n".join(lines)
