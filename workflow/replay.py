"""The replay client: its command, what it leaves and what that says. The only module that knows aiperf and its fork.

The client is called by path from an environment of its own, never imported. Its exit code proves nothing: it is 0
after a cancelled run, a dead server and 30 % failed requests. Only its summary is believed.
"""

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workflow.config import Replay
from workflow.contract import InputError, read_json

SUMMARY = "profile_export_aiperf.json"
RECORDS = "profile_export.jsonl"
CORPUS = "aiperf/dataset/generator/assets/shakespeare.txt"
"""The text that the client draws prompts from, inside of its distribution."""
SHORTEST_SUBMISSION_S = 900
"""Below this window the scenario refuses to run, unless told to; the result is then marked as not for submission."""


PROGRAMS = {"aiperf": "aiperf", "agentx-harness": "agentx"}
"""Client -> its program. The fork installs one called `aiperf` too, which would print another version."""


@dataclass(frozen=True)
class ReplayPaths:
    """Where a replay finds its parts; all absolute."""

    environment: Path
    sessions: Path
    """Folder of Weka traces."""
    hf_home: Path
    """Offline hub cache that holds the tokenizer under the model's name."""
    dataset_cache: Path
    """Where the client keeps the dataset it builds from the traces, to build it once for all points."""
    artefacts: Path


def corpus(environment: Path) -> Path:
    """Return the text that the client draws prompts from; raises InputError if the client's layout has changed."""
    found = sorted(environment.glob(f"lib/python*/site-packages/{CORPUS}"))
    if not found:
        raise InputError("the client's prompt corpus is not in its environment", file=environment)
    return found[0]


def command(
    replay: Replay, concurrency: int, model: str, tokenizer: str, url: str, paths: ReplayPaths
) -> tuple[str, ...]:
    """Return the client's argv for one replay."""
    argv = [
        str(paths.environment / "bin" / PROGRAMS[replay.client]),
        "profile",
        *("--scenario", replay.scenario),
        *("--model", model),
        *("--tokenizer", tokenizer),
        *("--url", url),
        *("--endpoint-type", "chat"),
        "--streaming",
        *("--custom-dataset-type", "weka_trace"),
        *("--input-file", str(paths.sessions)),
        *("--concurrency", str(concurrency)),
        *("--benchmark-duration", _number(replay.duration_s)),
        *("--benchmark-grace-period", _number(replay.grace_s)),
        *("--warmup-grace-period", _number(replay.warmup_grace_s)),
        *("--request-timeout-seconds", _number(replay.request_timeout_s)),
        *("--trajectory-start-min-ratio", _number(replay.start_ratio_min)),
        *("--trajectory-start-max-ratio", _number(replay.start_ratio_max)),
        *("--failed-request-threshold", _number(replay.stop_above_error_share)),
        *("--random-seed", str(replay.random_seed)),
        # The client's own counting of prompt tokens keeps a core busy; the server says them in `usage`.
        "--use-server-token-count",
        *("--extra-inputs", "ignore_eos:true"),
        # A server that closes an idle connection just as the client reuses it fails the request (6 of 338 seen).
        *("--connection-reuse-strategy", "never"),
        *("--slice-duration", "1"),
        "--no-gpu-telemetry",
        *("--ui", "none"),
        *("--output-artifact-dir", str(paths.artefacts)),
    ]
    if replay.idle_gap_cap_s is not None:
        argv += ["--trace-idle-gap-cap-seconds", _number(replay.idle_gap_cap_s)]
    if replay.workers is not None:
        argv += ["--workers-max", str(replay.workers), "--record-processor-service-count", "1"]
    if replay.warmup_requests_per_lane is not None:
        argv += ["--warmup-requests-per-lane", str(replay.warmup_requests_per_lane)]
    # The scenario accepts neither a short window, nor traces of one's own, nor shorter pauses without this; all three
    # are stated in the result.
    argv.append("--unsafe-override")
    return tuple(argv)


def environment_variables(paths: ReplayPaths) -> dict[str, str]:
    """Return what the client reads from its environment: where things are, and that there is no network."""
    return {
        "HF_HOME": str(paths.hf_home),
        "HF_HUB_OFFLINE": "1",
        "AIPERF_DATASET_MMAP_CACHE_DIR": str(paths.dataset_cache),
    }


def _number(value: float) -> str:
    return f"{value:g}"


@dataclass(frozen=True)
class Progress:
    """How far a running replay is."""

    phase: str
    """`preparing`, `warm-up`, `profiling`, `draining` or `summarising`."""
    requests: int
    """Requests written to the client's records so far, warm-up included."""


# A phase begins with its line in the client's log.
_PHASES = (
    ("preparing", re.compile(r"Starting AIPerf System")),
    ("warm-up", re.compile(r"Credit phase start: warmup")),
    ("profiling", re.compile(r"Credit phase start: profiling")),
    ("draining", re.compile(r"Waiting for event 'profiling phase credits returned'")),
    ("summarising", re.compile(r"Processing records results|All requests have completed")),
)


def progress(log: Path, artefacts: Path) -> Progress:
    """Read a running replay's phase and number of recorded requests from its log and records."""
    text = log.read_text(errors="replace") if log.exists() else ""
    phase = "preparing"
    for name, line in _PHASES:
        if line.search(text):
            phase = name
    requests = 0
    with contextlib.suppress(FileNotFoundError), (artefacts / RECORDS).open("rb") as stream:
        requests = sum(1 for _ in stream)
    return Progress(phase, requests)


@dataclass(frozen=True)
class Outcome:
    """What a finished client left behind."""

    problem: str | None
    """Why there is nothing to measure, in one sentence; None if there is a summary with at least one request."""
    log_tail: tuple[str, ...]


def outcome(exit_code: int, log: Path, artefacts: Path) -> Outcome:
    """Judge what the client left, whatever its exit code: is there something to measure?"""
    tail = tuple(log.read_text(errors="replace").splitlines()[-12:]) if log.exists() else ()
    path = artefacts / SUMMARY
    if not path.exists():
        return Outcome(f"the replay client ended with code {exit_code} and left no summary", tail)
    try:
        summary: dict[str, Any] = read_json(path)
    except InputError as error:
        return Outcome(f"the replay client's summary cannot be read: {error}", tail)
    count = (summary.get("request_count") or {}).get("avg") or 0
    if not count:
        return Outcome(f"the replay client ended with code {exit_code} without one successful request", tail)
    return Outcome(None, tail)
