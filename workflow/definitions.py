"""What every metric means: name, unit, formula, source, smallest sample; docs/definitions.md is made of it."""

from collections.abc import Iterator, Mapping
from typing import Literal

from workflow.contract import Reason, Strict

# Raised when a formula changes, so that numbers of two definitions are never put on one axis.
DEFINITION_VERSION = 1

Better = Literal["lower", "higher"]

# A percentile needs two requests beyond it, else it is the maximum under another name: n * (1 - p) >= 2.
MINIMUM_SAMPLES: Mapping[str, int] = {"mean": 1, "p50": 1, "p90": 20, "p95": 40, "p99": 200}
PERCENTILES: Mapping[str, float] = {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0}


class Definition(Strict):
    """One metric."""

    name: str
    unit: str
    formula: str
    source: str
    """Artefact that the numbers are read from."""
    minimum_samples: int
    """Fewer requests than this give null."""
    since: int
    """Definition version in which the formula got its present meaning."""
    better: Better | None


class Value(Strict):
    """One metric of one point. Null is not zero: a value that was not measured says why."""

    value: float | None
    null_reason: str | None = None
    samples: int | None = None
    """Requests behind a statistic."""
    numerator: float | None = None
    """For rates and shares."""
    denominator: float | None = None


def missing(reason: str, samples: int | None = None) -> Value:
    """Return a value that was not measured."""
    return Value(value=None, null_reason=reason, samples=samples)


def ratio(numerator: float | None, denominator: float | None, reason: str) -> Value:
    """Return numerator / denominator with both kept; null with `reason` where either is unknown or the latter is 0."""
    if numerator is None or denominator is None:
        return missing(reason)
    if denominator <= 0:
        return Value(value=None, null_reason="the denominator is 0", numerator=numerator, denominator=denominator)
    return Value(value=numerator / denominator, numerator=numerator, denominator=denominator)


RECORDS = "client records"
SERVER = "server metrics"
LATENCIES: Mapping[str, str] = {
    "ttft": "time to first token of a request",
    "e2e": "request start to last byte",
    "itl": "the client's mean inter-token latency of a request; requests with < 2 output tokens have none",
    "tpot": "(e2e - ttft) / (output tokens - 1) of a request; requests with < 2 output tokens have none",
    "full_response_itl": "the client's inter-token latency over reasoning and answer (agentx-harness only)",
}
INTERACTIVITIES: Mapping[str, str] = {
    "interactivity": "1 / the same statistic of itl, so p90 is the slow tail (InferenceX's intvty)",
    "full_response_interactivity": "1 / the same statistic of full_response_itl",
    "e2e_interactivity": "1 / the same statistic of e2e / output tokens (InferenceX's e2e_norm_intvty)",
}
TIERS: Mapping[str, str] = {
    "device": "the engine's own device cache",
    "host": "host memory, or whatever is behind a connector that does not tell its tiers apart",
    "storage": "disk or remote storage, where the engine tells it from host memory",
    "peer": "another engine, where the engine tells it apart",
    "computed": "nowhere: they were computed",
}
STEADY = (
    "in the steady window, from the start of the profiling phase to the requested duration: a prompt counts at its "
    "first token, output tokens count evenly between first token and end"
)


def _one(
    name: str, unit: str, formula: str, source: str, better: Better | None = None, *, least: int = 0
) -> Definition:
    return Definition(
        name=name, unit=unit, formula=formula, source=source, minimum_samples=least, since=1, better=better
    )


def _of_requests() -> Iterator[Definition]:
    for prefix, formula in LATENCIES.items():
        for statistic, least in MINIMUM_SAMPLES.items():
            text = f"{statistic} over successful profiled requests of: {formula}"
            yield _one(f"{prefix}_{statistic}_s", "s", text, RECORDS, "lower", least=least)
    for prefix, formula in INTERACTIVITIES.items():
        for statistic, least in MINIMUM_SAMPLES.items():
            yield _one(f"{prefix}_{statistic}_tok_per_s", "tokens/s/user", formula, RECORDS, "higher", least=least)
    for side in ("input", "output"):
        for statistic in ("mean", "p50", "p90"):
            text = f"{statistic} of the {side} tokens of successful profiled requests"
            yield _one(f"{side}_tokens_{statistic}", "tokens", text, RECORDS, least=MINIMUM_SAMPLES[statistic])
    for side in ("input", "output", "total"):
        name, unit = "tok_per_s_per_gpu", "tokens/s/GPU"
        yield _one(f"{side}_{name}", unit, f"{side} tokens {STEADY}; / seconds / GPUs", RECORDS, "higher")
    for side in ("input", "output", "total"):
        name, unit = "tok_per_s_per_gpu", "tokens/s/GPU"
        text = f"all {side} tokens of successful profiled requests / (last end - first start) / GPUs"
        yield _one(f"inferencex_{side}_{name}", unit, text, RECORDS, "higher", least=1)
    yield _one("window_s", "s", "length of the steady window", "request, or the client's configuration")
    yield _one("inferencex_window_s", "s", "last end - first start of successful profiled requests", RECORDS, least=1)
    yield _one("drain_s", "s", "end of the steady window to the last end of a profiled request", RECORDS)
    yield _one(
        "drain_output_tok_per_s_per_gpu", "tokens/s/GPU", "output tokens after the window / drain_s / GPUs", RECORDS
    )
    yield _one(
        "request_per_s",
        "requests/s",
        "successful requests that ended in the steady window / seconds",
        RECORDS,
        "higher",
    )
    yield _one(
        "achieved_concurrency_mean", "requests", "in-flight profiled request-seconds in the window / seconds", RECORDS
    )
    yield _one("busy_share", "fraction", "seconds of the window with a profiled request in flight / seconds", RECORDS)
    yield _one(
        "activity_span_share", "fraction", "seconds from window start to the last activity in it / seconds", RECORDS
    )
    yield _one(
        "client_lag_p95_s", "s", "p95 of request sent - credit issued inside the client", RECORDS, "lower", least=40
    )
    yield _one("error_share", "fraction", "failed / (succeeded + failed) profiled requests", RECORDS, "lower")
    yield _one(
        "timed_out_share",
        "fraction",
        "failed because the client gave up waiting / (succeeded + failed) profiled requests; no latency holds them",
        RECORDS,
        "lower",
    )
    yield _one("cancelled_share", "fraction", "cancelled / all profiled requests", RECORDS)
    yield _one(
        "zero_token_share", "fraction", "successful requests without an output token / successful", RECORDS, "lower"
    )
    yield _one(
        "unrecorded_share",
        "fraction",
        "requests sent in the profiling phase without a record (too long for the context, cancelled at the end, lost) "
        "/ requests sent",
        "client log, records",
        "lower",
    )
    yield _one("unreadable_share", "fraction", "unreadable lines / all lines of the records", RECORDS, "lower")


def _of_caches() -> Iterator[Definition]:
    for tier, where in TIERS.items():
        better: Better | None = "lower" if tier == "computed" else None
        yield _one(
            f"prompt_share_{tier}",
            "fraction",
            f"prompt tokens from {where} / all prompt tokens",
            "server metrics, or the engine's log",
            better,
        )
    yield _one(
        "cached_share",
        "fraction",
        "prompt tokens from any cache / all prompt tokens",
        "server metrics, or client records",
        "higher",
    )
    yield _one(
        "frozen_prefix_share",
        "fraction",
        "follow-up turns that found to the token as much cached as the turn before, although at least 512 tokens of "
        "that turn's prompt lay beyond it / follow-up turns of a conversation whose prompt grew",
        RECORDS,
        "lower",
    )
    yield _one(
        "ceiling_share", "fraction", "prompt blocks that an endless cache would hold / prompt blocks", "client summary"
    )
    yield _one(
        "host_hit_share_of_misses",
        "fraction",
        "prompt tokens from host / prompt tokens not on the device (conditional)",
        "server metrics, or the engine's log",
        "higher",
    )
    yield _one(
        "store_hit_share_of_lookups",
        "fraction",
        "tokens hit / tokens looked up in the store, retries included (conditional)",
        SERVER,
    )
    yield _one(
        "store_early_exit_share",
        "fraction",
        "lookups that the store ended before it looked / lookups; their tokens count neither as looked up nor as hit",
        SERVER,
        "lower",
    )
    yield _one(
        "store_lookups",
        "lookups",
        "times a store was asked which blocks of a prompt it holds; one that waits may be looked up in every step",
        SERVER,
    )
    yield _one(
        "store_lookup_s",
        "s",
        "time that lookups took at the store's client; the way from the scheduler to it is not in it",
        SERVER,
        "lower",
    )
    yield _one(
        "prefix_hit_share_of_attempts",
        "fraction",
        "prefix cache hits / queries; a waiting request counts at every scheduling attempt",
        SERVER,
    )
    for direction in ("host", "device"):
        yield _one(f"transfer_to_{direction}_bytes", "bytes", f"KV bytes copied to the {direction}", SERVER)
        yield _one(
            f"transfer_to_{direction}_s", "s", f"time of the copies to the {direction}, summed over ranks", SERVER
        )
        yield _one(
            f"copy_rate_to_{direction}_gb_per_s",
            "GB/s",
            f"transfer_to_{direction}_bytes / transfer_to_{direction}_s: one rank's rate while it copies",
            SERVER,
        )
    yield _one(
        "preemptions", "requests", "requests that lost their device blocks and were queued again", SERVER, "lower"
    )
    yield _one(
        "device_kv_use_max_share",
        "fraction",
        "highest share of the device KV pool in use, of the fullest engine",
        SERVER,
    )
    yield _one(
        "device_kv_capacity_tokens",
        "tokens",
        "size of the device KV pool, last start only",
        "server metrics, or the engine's log",
    )
    yield _one(
        "host_kv_use_max_share",
        "fraction",
        "highest fill of the host tier / its size, of the fullest engine",
        "server metrics, or the engine's log",
    )
    yield _one(
        "host_kv_used_max_bytes", "bytes", "highest fill of the host tier", "server metrics, or the engine's log"
    )
    yield _one("host_kv_capacity_bytes", "bytes", "size of the host tier", "server metrics, or the plan's pinned bytes")
    yield _one(
        "host_memory_max_bytes",
        "bytes",
        "highest resident memory of the engine and its sidecars at one time; without samples that of scraped processes",
        "samples on the node, or server metrics",
        "lower",
    )


def _of_the_run() -> Iterator[Definition]:
    yield _one("startup_s", "s", "start of the first process to the first answer", "run", "lower")
    yield _one(
        "traces_loaded",
        "traces",
        "traces that the client loaded, else trace ids seen in records",
        "client log, records",
    )
    yield _one(
        "unique_prompts",
        "prompts",
        "different turns of recorded conversations among the successful profiled requests; one that is played again is "
        "another prompt only where the client begins each play with another text",
        RECORDS,
    )
    yield _one("power_mean_w", "W", "mean power of all GPUs over the steady window, summed", "power samples", "lower")
    for side in ("output", "total"):
        yield _one(
            f"energy_j_per_{side}_token",
            "J/token",
            f"energy over the steady window / {side} tokens in it",
            "power samples, client records",
            "lower",
        )


INVALID: Mapping[Reason, str] = {
    Reason.ERROR_SHARE: "more requests failed than `limits.error_share` allows",
    Reason.NO_REQUESTS: "no profiled request succeeded",
    Reason.ZERO_TOKENS: "requests were answered without a token",
    Reason.CLIENT_CANCELLED: "the client stopped before its window and drain were over",
    Reason.CLIENT_INCOMPLETE: "the client wrote no whole summary",
    Reason.WINDOW_SHORT: "the profiling phase was shorter than `limits.window_share` of what was asked for",
    Reason.OFFLOAD_NOT_PROVEN: "a log line that proves the backend's set-up is missing, or one is there that "
    "disproves it; or nothing shows that the tier gave anything back although something was left for it to give",
    Reason.OFFLOAD_IN_CONTROL: "the arm without offload stored or loaded KV",
    Reason.ABOVE_CEILING: "more was cached than the sessions allow: an earlier run or the warm-up leaked in",
    Reason.SHARES_DO_NOT_ADD_UP: "the prompt tokens by source are not all prompt tokens",
    Reason.BAD_RECORDS: "lines of the records are damaged, or stand there twice",
    Reason.BAD_LATENCY: "latencies are zero, negative, or longer than their request",
    Reason.COUNTER_RESET: "a server's counters began anew during the run",
    Reason.VERSION_MISMATCH: "another version served or replayed than was declared",
    Reason.TRACES_MISSING: "the client loaded fewer sessions than were declared",
    Reason.WARMUP_NOT_DRAINED: "warm-up requests ran on into the window",
    Reason.COVERAGE: "nothing was going on any more long before the window ended",
    Reason.COPY_RATE_ABOVE_BUS: "the copy rate that counters imply is more than the bus carries",
    Reason.CLIENT_BOUND: "the client sent its requests late and measured itself",
    Reason.REQUESTS_LOST: "requests that the client sent have no record",
    Reason.CLIENT_DISAGREES: "the client's summary is not what its records give",
    Reason.TOKENS_DISAGREE: "the servers counted other prompts than the client sent: one is scraped twice or never",
    Reason.KV_INTEGRITY: "answers changed after their KV blocks had been evicted and restored",
    Reason.DEGRADED: "the engine's log says that the backend lost blocks or fell back",
    Reason.CLOCK_JUMP: "the node's clock jumped during the replay",
}
"""Why a point is `invalid`: measured, kept, drawn hollow, and in no ratio."""

_LISTED = (*_of_requests(), *_of_caches(), *_of_the_run())
DEFINITIONS: Mapping[str, Definition] = {definition.name: definition for definition in _LISTED}


INTRODUCTION = (
    "It keeps its numbers, is drawn hollow and is in no ratio. The report gives the figures behind each reason."
)


def definitions_table() -> str:
    """Return docs/definitions.md; a test compares the committed file with this."""
    lines = [
        "# Metrics",
        "",
        "Generated by `python -m workflow.definitions`; a test compares this file with the code.",
        "",
        f"Definition version {DEFINITION_VERSION}. Percentiles are linear interpolations at (n - 1) * p between sorted",
        "values. A value that was not measured, or has fewer requests than its minimum, is null with a reason.",
        "",
        "| name | unit | formula | source | at least | since | better |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in DEFINITIONS.values():
        least = str(one.minimum_samples) if one.minimum_samples else ""
        formula = one.formula.replace("|", "\\|")
        lines.append(
            f"| {one.name} | {one.unit} | {formula} | {one.source} | {least} | {one.since} | {one.better or ''} |"
        )
    lines += ["", "## Why a point is invalid", "", INTRODUCTION, "", "| reason | what it means |", "|---|---|"]
    lines += [f"| {reason.value} | {meaning} |" for reason, meaning in INVALID.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(definitions_table(), end="")
