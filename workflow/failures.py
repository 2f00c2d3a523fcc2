"""Evidence -> the class of a failed attempt and its first cause. Pure, except for writing the record."""

import re
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

from workflow.contract import Document


class FailureClass(StrEnum):
    """Why an attempt left nothing to measure. The class decides whether another try is worth its cost."""

    CONFIGURATION = "configuration"
    """A part is missing or does not fit; the same again cannot work."""
    VERSION_MISMATCH = "version_mismatch"
    """Another version serves than the search space declares."""
    ENGINE_NOT_READY = "engine_not_ready"
    ENGINE_DIED = "engine_died"
    SIDECAR_DIED = "sidecar_died"
    CLIENT_FAILED = "client_failed"
    OUT_OF_TIME = "out_of_time"
    INTERRUPTED = "interrupted"
    ALREADY_RUNNING = "already_running"
    TIME_LIMIT = "time_limit"
    """The scheduler ended the job at its time limit."""
    OUT_OF_MEMORY = "out_of_memory"
    """The job, or the engine in it, took more host memory than was asked for."""
    CANCELLED = "cancelled"
    """Somebody cancelled the job, and it was not this sweep's own Ctrl-C."""
    NODE_FAILURE = "node_failure"
    PREEMPTED = "preempted"
    SUBMIT_REFUSED = "submit_refused"
    """The scheduler did not take the job: a partition, account, QOS or limit that does not fit."""
    IMAGE_PULL = "image_pull"
    """The container image could not be fetched."""
    UNKNOWN = "unknown"


WORTH_RETRYING = frozenset(
    {
        FailureClass.ENGINE_NOT_READY,
        FailureClass.ENGINE_DIED,
        FailureClass.SIDECAR_DIED,
        FailureClass.CLIENT_FAILED,
        FailureClass.OUT_OF_TIME,
        FailureClass.INTERRUPTED,
        FailureClass.TIME_LIMIT,
        FailureClass.OUT_OF_MEMORY,
        FailureClass.CANCELLED,
        FailureClass.NODE_FAILURE,
        FailureClass.PREEMPTED,
        FailureClass.IMAGE_PULL,
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


class AttemptFailed(Exception):
    """Ends an attempt with a class and a message."""

    def __init__(self, failure_class: FailureClass, message: str) -> None:
        self.failure_class, self.message = failure_class, message
        super().__init__(message)


_TRACEBACK = re.compile(r"^Traceback \(most recent call last\):")
_ERROR = re.compile(r"\b(error|fatal|abort|exception|out of memory|killed|cannot|failed)\b", re.IGNORECASE)


def first_cause(log: Iterable[str]) -> str | None:
    """Return the exception of the first Python traceback in a log, else the first line that speaks of an error."""
    inside = False
    first_error: str | None = None
    for line in (raw.rstrip() for raw in log):
        if _TRACEBACK.search(line):
            inside = True
        elif inside and line and not line.startswith((" ", "\t")):
            return line.strip()
        elif first_error is None and _ERROR.search(line):
            first_error = line.strip()
    return first_error


def last_failure(folder: Path, point: str) -> Failure | None:
    """Return the newest record of a point's failures, or None."""
    records = [Failure.read(path) for path in folder.glob(f"{point}.*.json")]
    return max(records, key=lambda record: record.unix_s, default=None)
