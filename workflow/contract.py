"""What every file of the pipeline agrees on: strict models, schema versions, atomic writes, errors and reasons."""

import contextlib
import functools
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, ParamSpec, Self

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

P = ParamSpec("P")


class InputError(Exception):
    """A user's mistake, as one message without a traceback.

    The message says what was found, where, what is allowed and what to do. Several mistakes of one file are
    joined, so that a person mends them in one go.
    """

    def __init__(
        self,
        found: str,
        *,
        file: str | Path | None = None,
        line: int | None = None,
        key: str | None = None,
        allowed: str | None = None,
        do: str | None = None,
    ) -> None:
        self.found, self.file, self.line, self.key, self.allowed, self.do = found, file, line, key, allowed, do
        where = ":".join(str(part) for part in (file, line) if part is not None)
        head = ": ".join(part for part in (where, key, found) if part)
        tail = [f"allowed: {allowed}"] if allowed else []
        tail += [do] if do else []
        super().__init__("; ".join([head, *tail]))

    @classmethod
    def join(cls, errors: Iterable["InputError"]) -> "InputError":
        """Return one error that shows all of them, a line each; the only one as it is."""
        listed = list(errors)
        return listed[0] if len(listed) == 1 else cls("\n".join(str(error) for error in listed))


def reports_input_errors(main: Callable[P, int]) -> Callable[P, int]:
    """Return a program's main function that ends with the message alone, and 2, where it meets an InputError."""

    @functools.wraps(main)
    def reporting(*arguments: P.args, **options: P.kwargs) -> int:
        try:
            return main(*arguments, **options)
        except InputError as error:
            print(error, file=sys.stderr)
            return 2

    return reporting


@contextlib.contextmanager
def without_traceback() -> Iterator[None]:
    """End a script that meets an InputError with its message alone."""
    try:
        yield
    except InputError as error:
        sys.exit(str(error))


class DamagedFile(InputError):
    """A file that was cut off or half written: nothing that its author meant to say can be read from it."""


class Reason(StrEnum):
    """Why a point is not `ok`. The code is stable; `Finding.detail` says the numbers."""

    ERROR_SHARE = "error_share_above_limit"
    NO_REQUESTS = "no_successful_request"
    ZERO_TOKENS = "zero_token_answers"
    CLIENT_CANCELLED = "client_cancelled"
    CLIENT_INCOMPLETE = "client_summary_incomplete"
    WINDOW_SHORT = "window_short"
    OFFLOAD_NOT_PROVEN = "offload_not_proven"
    OFFLOAD_IN_CONTROL = "offload_in_control"
    ABOVE_CEILING = "hit_share_above_ceiling"
    SHARES_DO_NOT_ADD_UP = "token_shares_do_not_add_up"
    BAD_RECORDS = "unreadable_records"
    BAD_LATENCY = "impossible_latency"
    COUNTER_RESET = "counter_reset"
    VERSION_MISMATCH = "version_mismatch"
    TRACES_MISSING = "fewer_traces_than_declared"
    WARMUP_NOT_DRAINED = "warmup_not_drained"
    COVERAGE = "server_activity_ends_early"
    COPY_RATE_ABOVE_BUS = "copy_rate_above_bus"
    CLIENT_BOUND = "client_bound"
    REQUESTS_LOST = "requests_without_record"
    CLIENT_DISAGREES = "client_summary_disagrees"
    TOKENS_DISAGREE = "server_and_client_tokens_disagree"
    KV_INTEGRITY = "kv_integrity"
    DEGRADED = "offload_degraded"
    CLOCK_JUMP = "clock_jump"


class Strict(BaseModel):
    """Base of every model. An unknown key is an error: an ignored key keeps "working" while its setting is lost."""

    # A model is built on its first use: a short command then pays only for the models it needs.
    # No NaN: in a file it would be null, which says "not measured".
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        defer_build=True,
        allow_inf_nan=False,
    )


class Finding(Strict):
    """A reason code with the numbers behind it."""

    code: Reason
    detail: str


class Document(Strict):
    """A JSON file that one module writes and others read.

    `SCHEMA_VERSION` is raised when the meaning of a field changes; readers refuse every other version by name, since
    a field that is read with an old meaning gives a plausible wrong number.
    """

    SCHEMA_VERSION: ClassVar[int] = 1

    schema_version: int

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read and check a document.

        Raises InputError: no such file, not JSON, another schema version, or fields that do not fit the model.
        """
        data = read_json(path)
        found = data.get("schema_version") if isinstance(data, dict) else None
        if found != cls.SCHEMA_VERSION:
            age = "an older" if isinstance(found, int) and found < cls.SCHEMA_VERSION else "a newer or unknown"
            raise InputError(
                f"found {age} version {found!r} of a {cls.__name__} file",
                file=path,
                key="schema_version",
                allowed=str(cls.SCHEMA_VERSION),
                do="make the file again with this checkout, or read it with the checkout that wrote it",
            )
        try:
            return cls.model_validate_json(json.dumps(data))
        except ValidationError as error:
            raise InputError.join(
                InputError(issue["msg"], file=path, key=".".join(str(part) for part in issue["loc"]))
                for issue in error.errors()
            ) from None

    def write(self, path: Path) -> None:
        """Write the document as indented JSON, all of it or nothing."""
        write_atomic(path, self.to_json().encode())

    def to_json(self) -> str:
        """Return the file's text: sorted keys, no NaN (a value that was not measured is null)."""
        # By orjson: json's own encoder is slow with an indent, seconds for a plan of 5,000 points.
        data = self.model_dump(mode="json", by_alias=True)
        return orjson.dumps(data, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS).decode() + "\n"


def read_json(path: Path) -> Any:
    """Parse a JSON file; raises InputError with the path for a missing one, DamagedFile for a damaged one."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise InputError("no such file", file=path) from None
    except ValueError as error:
        raise DamagedFile(f"not JSON: {error}", file=path) from None


def write_atomic(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write bytes so that a reader sees the old file or the whole new one, also after a power cut if `durable`.

    Not durable is for what is made again at every start, where thousands of flushes would take minutes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            if durable:
                os.fsync(stream.fileno())
            os.fchmod(stream.fileno(), 0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


# `json.dumps` makes an encoder for each call, which a large plan asks for tens of thousands of times.
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def canonical_json(data: Any) -> bytes:
    """Return the one byte string for equal data: sorted keys, compact, ASCII, no NaN."""
    return _CANONICAL.encode(data).encode()


def digest(data: Any, length: int = 64) -> str:
    """Return the first `length` hex digits of the sha256 of the canonical JSON of `data`."""
    return hashlib.sha256(canonical_json(data)).hexdigest()[:length]


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file's bytes as hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
