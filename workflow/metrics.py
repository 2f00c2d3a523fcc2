"""From one attempt's raw artefacts to numbers that mean one thing, and a verdict. Pure: reads a folder, writes nothing.

`python -m workflow.metrics DIR` prints the metrics of any folder of client artefacts; `--inferencex` prints them as
InferenceX's own aggregate.
"""

import argparse
import json
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np

from workflow.config import Limits
from workflow.contract import Document, Finding, Strict, reports_input_errors
from workflow.definitions import (
    DEFINITION_VERSION,
    DEFINITIONS,
    MINIMUM_SAMPLES,
    PERCENTILES,
    TIERS,
    Definition,
    Value,
    missing,
    ratio,
)
from workflow.evidence import Context, Evidence, last_end, read_evidence
from workflow.inferencex_aggregate import aggregate
from workflow.readers.columns import PART_ROWS
from workflow.readers.records import Floats, Integers, Records
from workflow.verdict import judge, remarks

__all__ = ["DEFINITIONS", "Accounting", "Context", "Definition", "PointMetrics", "Value", "measure"]

NOT_TOLD = "the engine does not tell this tier apart"


class Accounting(Strict):
    """Every line of the records in exactly one class; the classes add up to `records_total`."""

    records_total: int
    warmup: int
    warmup_failed: int
    succeeded: int
    failed: int
    cancelled: int
    unreadable: int


class PointMetrics(Document):
    """results/metrics/{point}.json: what one attempt of one point measured, and whether it may be published."""

    point: str
    """The point's id, or the folder's name where there is no point."""
    status: Literal["ok", "invalid"]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    """What a reader should know, without effect on the verdict."""
    accounting: Accounting
    error_categories: dict[str, int] = {}
    """Kinds of the failed profiled requests, with counts."""
    definition_version: int
    values: dict[str, Value]
    """Every name of DEFINITIONS is a key."""


def measure(folder: Path, context: Context) -> PointMetrics:
    """Return the metrics and verdict of one attempt.

    `folder` holds the client's artefacts directly or in `client/`, logs beside them, and Prometheus text snapshots in
    `metrics/<name>.before.prom` and `.after.prom` where they were taken.
    Raises InputError: no records, or an artefact with an unknown schema version.
    """
    return measure_evidence(read_evidence(folder, context), context, folder.resolve().name)


def measure_evidence(evidence: Evidence, context: Context, name: str) -> PointMetrics:
    """Return what `measure` does, of a folder of this name that was read already."""
    values = compute(evidence, context)
    findings = judge(evidence, values, context)
    records = evidence.records
    return PointMetrics(
        schema_version=PointMetrics.SCHEMA_VERSION,
        point=context.point or name,
        status="invalid" if findings else "ok",
        findings=tuple(findings),
        notes=(*evidence.notes, *remarks(evidence, values, context)),
        accounting=Accounting(
            records_total=records.total,
            warmup=records.warmup,
            warmup_failed=records.warmup_failed,
            succeeded=records.succeeded,
            failed=records.failed,
            cancelled=records.cancelled,
            unreadable=records.unreadable,
        ),
        error_categories=dict(records.profiled_error_categories),
        definition_version=DEFINITION_VERSION,
        values=values,
    )


# ---------------------------------------------------------------------------------------------- computing
def compute(evidence: Evidence, context: Context) -> dict[str, Value]:
    """Return a value for every definition, in the definitions' order."""
    values: dict[str, Value] = {}
    values.update(_latencies(evidence.records))
    values.update(_accounting(evidence.records))
    lost, sent = evidence.unrecorded or (None, None), evidence.client_log.sent
    values["unrecorded_share"] = ratio(_float(lost[0]), _float(sent), "the client's log does not say what it sent")
    values.update(_throughput(evidence, context))
    values.update(_prompt_sources(evidence))
    frozen, follow_ups = frozen_prefixes(evidence.records)
    values["frozen_prefix_share"] = ratio(float(frozen), float(follow_ups), "no follow-up turn")
    values.update(_server(evidence, context))
    values.update(_power(evidence, context, values))
    values["unique_prompts"] = (
        Value(value=float(unique_prompts(evidence.records)), samples=evidence.records.succeeded)
        if evidence.records.succeeded
        else missing("no successful request", 0)
    )
    loaded = evidence.client_log.traces or len(evidence.records.traces)
    values["traces_loaded"] = Value(value=float(loaded)) if loaded else missing("no trace ids")
    values["startup_s"] = (
        missing("the run did not record it") if context.startup_s is None else Value(value=context.startup_s)
    )
    return {name: values[name] for name in DEFINITIONS}


def _float(number: int | None) -> float | None:
    return None if number is None else float(number)


def _statistics(data: Floats, names: Collection[str]) -> dict[str, Value]:
    """Return statistics of finite values, by name; null below their minimum sample counts. Sorts `data` in part."""
    size = int(data.size)
    if not size:
        return dict.fromkeys(names, missing("no request has it", 0))
    # The mean first: its last digit depends on the order of the values.
    found = {"mean": data.mean()}
    percentiles = [name for name in names if name in PERCENTILES]
    at = np.percentile(data, [PERCENTILES[name] for name in percentiles], overwrite_input=True)
    found |= zip(percentiles, at, strict=True)
    return {
        name: missing(f"{size} requests; {name} needs {MINIMUM_SAMPLES[name]}", size)
        if size < MINIMUM_SAMPLES[name]
        else Value(value=float(found[name]), samples=size)
        for name in names
    }


def _inverse(value: Value) -> Value:
    if value.value is None:
        return value
    if value.value <= 0:
        return missing("the latency is 0", value.samples)
    return Value(value=1 / value.value, samples=value.samples)


def tpot(e2e_s: Floats, ttft_s: Floats, output_tokens: Floats) -> Floats:
    """Return (e2e - ttft) / (output tokens - 1) in seconds; NaN below two tokens."""
    steps = np.where(output_tokens >= 2, output_tokens - 1, np.nan)
    return np.asarray((e2e_s - ttft_s) / steps, dtype=np.float64)


def itl(itl_s: Floats, output_tokens: Floats) -> Floats:
    """Return inter-token latencies in seconds; NaN below two tokens."""
    return np.where(output_tokens >= 2, itl_s, np.nan)


def e2e_per_token(e2e_s: Floats, output_tokens: Floats) -> Floats:
    """Return end-to-end seconds per output token; NaN without one."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(e2e_s / np.where(output_tokens > 0, output_tokens, np.nan), dtype=np.float64)


def as_recorded(values: Floats) -> Floats:
    """Return a column as it is."""
    return values


LATENCIES: Mapping[str, tuple[Callable[..., Floats], tuple[str, ...]]] = {
    "ttft": (as_recorded, ("ttft_s",)),
    "e2e": (as_recorded, ("e2e_s",)),
    "itl": (itl, ("itl_s", "output_tokens")),
    "tpot": (tpot, ("e2e_s", "ttft_s", "output_tokens")),
    "full_response_itl": (as_recorded, ("full_response_itl_s",)),
    "e2e_per_token": (e2e_per_token, ("e2e_s", "output_tokens")),
}
"""Name -> (function of columns, the columns): seconds of a request."""


def positive(data: Floats) -> Floats:
    """Return the finite values above 0: a latency of 0, below 0 or infinite was not measured."""
    return data[np.isfinite(data) & (data > 0)]


def finite(data: Floats) -> Floats:
    """Return the values that are there."""
    return data[np.isfinite(data)]


def gathered(
    records: Records, of: Callable[..., Floats], columns: tuple[str, ...], keep: Callable[[Floats], Floats]
) -> Floats:
    """Return `keep(of(*columns))` over all requests, without more of them in memory than the result."""
    found, size = np.empty(records.succeeded), 0
    for part in records.answered.parts(*columns):
        kept = keep(of(*part))
        found[size : size + kept.size] = kept
        size += kept.size
    return found[:size]


def _latencies(records: Records) -> dict[str, Value]:
    values: dict[str, Value] = {}
    for name, (of, columns) in LATENCIES.items():
        found = _statistics(gathered(records, of, columns, positive), MINIMUM_SAMPLES)
        values.update({f"{name}_{statistic}_s": value for statistic, value in found.items()})
    inverted = {
        "interactivity": "itl",
        "full_response_interactivity": "full_response_itl",
        "e2e_interactivity": "e2e_per_token",
    }
    for name, latency in inverted.items():
        for statistic in MINIMUM_SAMPLES:
            values[f"{name}_{statistic}_tok_per_s"] = _inverse(values[f"{latency}_{statistic}_s"])
    for side in ("input_tokens", "output_tokens"):
        found = _statistics(gathered(records, as_recorded, (side,), finite), ("mean", "p50", "p90"))
        values.update({f"{side}_{statistic}": value for statistic, value in found.items()})
    lag = gathered(records, as_recorded, ("lag_s",), finite)
    values["client_lag_p95_s"] = _statistics(lag, ("p95",))["p95"]
    return values


def _accounting(records: Records) -> dict[str, Value]:
    answered = records.succeeded + records.failed
    zero = float(np.sum(records.answered["output_tokens"] == 0))
    none = "no profiled request"
    return {
        "error_share": ratio(float(records.failed), float(answered), none),
        "timed_out_share": ratio(float(records.timed_out), float(answered), none),
        "cancelled_share": ratio(float(records.cancelled), float(answered + records.cancelled), none),
        "zero_token_share": ratio(zero, float(records.succeeded), none),
        "unreadable_share": ratio(float(records.unreadable), float(records.total), "no records"),
    }


def first_token_ns(start_ns: Integers, ttft_s: Floats) -> Floats:
    """Return when each request's first token came; its start where the time to first token is unknown or infinite."""
    ttft = np.nan_to_num(ttft_s, nan=0.0, posinf=0.0, neginf=0.0)
    return np.asarray(start_ns + ttft * 1e9, dtype=np.float64)


def prompt_tokens_between(records: Records, start_ns: int, stop_ns: int) -> float:
    """Return prompt tokens of the requests whose first token came in a stretch of time."""
    begun = 0.0
    for start, ttft, prompt in records.answered.parts("start_ns", "ttft_s", "input_tokens"):
        first = first_token_ns(start, ttft)
        begun += float(np.nansum(prompt[(first >= start_ns) & (first < stop_ns)]))
    return begun


def ended_between(records: Records, start_ns: int, stop_ns: int) -> int:
    """Return how many requests ended in a stretch of time."""
    ends = records.answered["end_ns"]
    return int(np.sum((ends >= start_ns) & (ends < stop_ns)))


def output_tokens_in(records: Records, edges_ns: Sequence[int]) -> list[float]:
    """Return output tokens made between each edge and the next: the first at the first token, then evenly to the end.

    Edges ascend.
    """
    made = [0.0] * (len(edges_ns) - 1)
    for start, ttft, end, output in records.answered.parts("start_ns", "ttft_s", "end_ns", "output_tokens"):
        tokens = np.nan_to_num(output)
        at_first, later = np.minimum(tokens, 1), np.maximum(tokens - 1, 0)
        first = first_token_ns(start, ttft)
        length = np.maximum(end - first, 1.0)
        for i, (here, there) in enumerate(pairwise(edges_ns)):
            overlap = np.minimum(end, there) - np.maximum(first, here)
            inside = np.clip(overlap / length, 0.0, 1.0)
            begun = ((first >= here) & (first < there)).astype(np.float64)
            made[i] += float(np.sum(at_first * begun + later * inside))
    return made


FROZEN_TOKENS = 512
"""Two of the largest chunks that a backend stores by (256 tokens): less can be missing of the last chunk alone."""


def frozen_prefixes(records: Records) -> tuple[int, int]:
    """Return (follow-up turns whose cached prefix stood still, follow-up turns), over conversations whose prompt grows.

    A cache that evicts gives a shorter prefix, one that stores a longer one. To the token the same prefix as a turn
    ago, with FROZEN_TOKENS or more of that turn's prompt beyond it, means that the turn was not stored at all.
    """
    conversation = records.answered["conversation"]
    order = np.lexsort((records.answered["start_ns"], conversation))
    prompt, cached = records.answered["input_tokens"], records.answered["cached_tokens"]
    frozen = follow_ups = 0
    for at in range(0, len(order) - 1, PART_ROWS):
        before, after = order[at : at + PART_ROWS], order[at + 1 : at + 1 + PART_ROWS]
        before = before[: len(after)]
        follows = (conversation[before] == conversation[after]) & (prompt[after] > prompt[before])
        follows &= np.isfinite(cached[before]) & np.isfinite(cached[after])
        stood = (cached[after] == cached[before]) & (prompt[before] - cached[after] >= FROZEN_TOKENS)
        # A prefix of nothing that stays nothing is a cache that does not help at all, not one that stopped storing.
        frozen += int(np.sum(follows & stood & (cached[after] > 0)))
        follow_ups += int(np.sum(follows))
    return frozen, follow_ups


def unique_prompts(records: Records) -> int:
    """Return how many different turns of conversations were answered."""
    turns, at = np.empty(records.succeeded, np.int64), 0
    for conversation, turn in records.answered.parts("conversation", "turn"):
        turns[at : at + turn.size] = conversation.astype(np.int64) << 32 | turn
        at += turn.size
    turns.sort()
    return int(np.count_nonzero(np.diff(turns))) + 1 if turns.size else 0


def _throughput(evidence: Evidence, context: Context) -> dict[str, Value]:
    records, window = evidence.records, evidence.window
    values: dict[str, Value] = {}
    inputs, outputs = (float(np.nansum(records.answered[f"{side}_tokens"])) for side in ("input", "output"))
    sides = {"input": inputs, "output": outputs, "total": inputs + outputs}
    answered = records.answered
    span = float(answered["end_ns"].max() - answered["start_ns"].min()) / 1e9 if records.succeeded else None
    none = "no successful request"
    values["inferencex_window_s"] = missing(none) if span is None else Value(value=span, samples=records.succeeded)
    for side, tokens in sides.items():
        seconds = None if span is None else span * context.gpus
        values[f"inferencex_{side}_tok_per_s_per_gpu"] = ratio(tokens, seconds, none)
    steady = (
        *(f"{side}_tok_per_s_per_gpu" for side in sides),
        *("window_s", "drain_s", "drain_output_tok_per_s_per_gpu", "request_per_s"),
        *("achieved_concurrency_mean", "busy_share", "activity_span_share"),
    )
    if window is None or window.duration_s is None or window.end_ns is None:
        reason = "no profiled request" if window is None else "the requested duration is not known"
        return values | {name: missing(reason) for name in steady}
    start, end, seconds = window.start_ns, window.end_ns, window.duration_s
    prompts = prompt_tokens_between(records, start, end)
    last = last_end(records)
    made, late = output_tokens_in(records, (start, end, max(end, last + 1)))
    for side, tokens in {"input": prompts, "output": made, "total": prompts + made}.items():
        values[f"{side}_tok_per_s_per_gpu"] = ratio(tokens, seconds * context.gpus, none)
    ended = ended_between(records, start, end)
    drain = max(0.0, (last - end) / 1e9)
    in_flight, busy, span_seconds = activity(records, start, end)
    values["window_s"] = Value(value=seconds)
    values["drain_s"] = Value(value=drain)
    values["drain_output_tok_per_s_per_gpu"] = (
        ratio(late, drain * context.gpus, none) if drain > 0 else missing("nothing ran after the window")
    )
    values["request_per_s"] = ratio(float(ended), seconds, none)
    values["achieved_concurrency_mean"] = ratio(in_flight, seconds, none)
    values["busy_share"] = ratio(busy, seconds, none)
    values["activity_span_share"] = ratio(span_seconds, seconds, none)
    return values


def activity(records: Records, start_ns: int, stop_ns: int) -> tuple[float, float, float]:
    """Return (request-seconds in flight, seconds with any request in flight, seconds until the last activity).

    All profiled requests count, failed and cancelled ones too: they load the server, and a long stream that is still
    running covers the window's end although no request starts there.
    """
    begins, ends = (
        np.concatenate([records.answered[name], records.unanswered[name]]) for name in ("start_ns", "end_ns")
    )
    for moments in (begins, ends):
        np.clip(moments, start_ns, stop_ns, out=moments)
    np.maximum(ends, begins, out=ends)
    in_flight = float((ends - begins).sum())
    # Nothing is in flight from the k-th end to the next begin, where that is later: k requests have begun, k ended.
    begins.sort()
    ends.sort()
    idle, span = float(begins[0] - start_ns), float(ends[-1] - start_ns)
    gaps = np.subtract(begins[1:], ends[:-1], out=begins[1:])
    idle += float(np.maximum(gaps, 0, out=gaps).sum())
    return in_flight / 1e9, (span - idle) / 1e9, span / 1e9


def _prompt_sources(evidence: Evidence) -> dict[str, Value]:
    """Return the exclusive shares of all prompt tokens, and the conditional rates under names of their own."""
    values: dict[str, Value] = {}
    prompt, tokens, cached = prompt_tokens_by_source(evidence)
    unknown = "no metric, record or log line tells prompt tokens by source"
    told = any(tokens[tier] is not None for tier in ("device", "host", "storage", "peer"))
    for tier in TIERS:
        reason = NOT_TOLD if told else why_not_split(evidence) or unknown
        values[f"prompt_share_{tier}"] = ratio(tokens[tier], prompt, reason)
    values["cached_share"] = ratio(cached, prompt, unknown)
    misses = None if prompt is None or tokens["device"] is None else prompt - tokens["device"]
    values["host_hit_share_of_misses"] = ratio(tokens["host"], misses, unknown)
    hits, lookups = evidence.amount("store_hit_tokens"), evidence.amount("store_lookup_tokens")
    if lookups is None:
        hits, lookups = evidence.amount("external_hits"), evidence.amount("external_queries")
    values["store_hit_share_of_lookups"] = ratio(hits, lookups, "the store exports no lookups")
    values["store_early_exit_share"] = ratio(
        evidence.amount("store_early_exits"), evidence.amount("store_lookups"), "the store exports no early exits"
    )
    values["prefix_hit_share_of_attempts"] = ratio(
        evidence.amount("prefix_hits"), evidence.amount("prefix_queries"), "the engine exports no prefix queries"
    )
    ceiling = evidence.summary.share("theoretical_prefix_cache_hit")
    values["ceiling_share"] = (
        missing("the client wrote no theoretical hit share")
        if ceiling is None
        else Value(value=ceiling[0], numerator=ceiling[1], denominator=ceiling[2])
    )
    return values


FAST_REPEAT = 0.3
"""Later turns repeat the turns before them and are longer; a TTFT this far below the first turn's needs a cache."""


def hits_elsewhere(evidence: Evidence) -> bool:
    """Say whether an engine that counts no cached token contradicts its own answers, or their times.

    Some engines export a hit counter that stays 0 for ever; 0 would then be a wrong number, not a low one.
    """
    share = evidence.client_cached_share
    if share is not None:
        return share > 0.01
    records = evidence.records
    turn, ttft = records.answered["turn"], records.answered["ttft_s"]
    first, later = positive(ttft[turn == 0]), positive(ttft[turn > 0])
    return first.size >= 10 and later.size >= 10 and bool(np.median(later) < FAST_REPEAT * np.median(first))


def why_not_split(evidence: Evidence) -> str | None:
    """Say why an engine's split by tier is not to be had: its counter is suspect, or its log lacks something."""
    if evidence.amount("tokens_from_device") == 0 and hits_elsewhere(evidence):
        return "the engine counts no cached token, its answers or their times say otherwise: the counter is suspect"
    log = evidence.log
    if log is None or not (log.tasks or log.restored_from_host):
        return None
    if log.clock_start_s is None:
        return "the engine's log has no line 'log clock starts at', so its tasks cannot be placed in the window"
    return "the engine's log has no task in the window"


def prompt_tokens_by_source(
    evidence: Evidence,
) -> tuple[float | None, dict[str, float | None], float | None]:
    """Return (prompt tokens, tokens by tier, cached tokens of all tiers) from the best source that is there.

    The engine's own split is best. `prefix_cache_queries` is not used: it counts a waiting request again at every
    scheduling attempt. Without a split, the clients' `cached_tokens` still give the share of all caches together.
    """
    tiers: dict[str, float | None] = dict.fromkeys(TIERS)
    computed = evidence.amount("tokens_computed")
    device = evidence.amount("tokens_from_device")
    if device is not None:
        tiers |= {
            "device": device,
            "host": evidence.amount("tokens_from_host"),
            "storage": evidence.amount("tokens_from_storage"),
            "computed": computed,
        }
        prompt = evidence.amount("prompt_tokens")
        cached = sum(value for tier, value in tiers.items() if value is not None and tier != "computed")
        if computed is None and prompt is not None:
            tiers["computed"] = prompt - cached
        known = sum(value for value in tiers.values() if value is not None)
        if cached > 0 or not hits_elsewhere(evidence):
            return (prompt or known), tiers, cached
        tiers = dict.fromkeys(TIERS)
    if evidence.sources is not None:
        found = evidence.sources
        tiers |= {"device": float(found.device), "host": float(found.host), "computed": float(found.computed)}
        return float(found.prompt), tiers, float(found.device + found.host)
    answers = evidence.answers_cached
    if answers is not None:
        cached, prompt = answers
        tiers["computed"] = prompt - cached
        return prompt, tiers, cached
    cached_found, prompt_found = evidence.amount("tokens_cached"), evidence.amount("prompt_tokens")
    if cached_found == 0 and hits_elsewhere(evidence):
        cached_found = None
    if cached_found is not None and prompt_found is None and computed is not None:
        prompt_found = cached_found + computed
    if cached_found is not None and prompt_found is not None:
        tiers["computed"] = prompt_found - cached_found
    return prompt_found, tiers, cached_found


def _server(evidence: Evidence, context: Context) -> dict[str, Value]:
    def plain(quantity: str) -> Value:
        found = evidence.amount(quantity)
        return missing(evidence.why_not(quantity)) if found is None else Value(value=found)

    absent = "no server exports it"
    values = {"preemptions": plain("preemptions")}
    values["store_lookups"], values["store_lookup_s"] = plain("store_lookups"), plain("store_lookup_time")
    for direction in ("host", "device"):
        moved, spent = evidence.amount(f"bytes_to_{direction}"), evidence.amount(f"time_to_{direction}")
        values[f"transfer_to_{direction}_bytes"] = plain(f"bytes_to_{direction}")
        values[f"transfer_to_{direction}_s"] = plain(f"time_to_{direction}")
        moved_gb = None if moved is None else moved / 1e9
        values[f"copy_rate_to_{direction}_gb_per_s"] = ratio(moved_gb, spent, evidence.why_not(f"bytes_to_{direction}"))
    values["device_kv_use_max_share"] = plain("device_use")
    capacity = evidence.amount("device_total_tokens")
    if capacity is None and evidence.log is not None and evidence.log.pool_tokens is not None:
        capacity = float(evidence.log.pool_tokens)
    values["device_kv_capacity_tokens"] = missing(absent) if capacity is None else Value(value=capacity)
    log = evidence.log
    used, total = evidence.amount("host_used_bytes"), evidence.amount("host_total_bytes")
    if used is None and log is not None and log.host_used_bytes is not None:
        used, total = log.host_used_bytes, log.host_limit_bytes
    use = plain("host_use")
    if use.value is None:
        full, size = evidence.fullest("host_used_tokens", "host_total_tokens")
        use = ratio(full, size, absent)
    if use.value is None:
        use = ratio(used, total, absent)
    values["host_kv_use_max_share"] = use
    values["host_kv_used_max_bytes"] = missing(absent) if used is None else Value(value=used)
    if total is None and context.pinned_bytes is not None:
        total = float(context.pinned_bytes)
    values["host_kv_capacity_bytes"] = missing(absent) if total is None else Value(value=total)
    # A server exports what its own first process takes: of vLLM the front end, while the tier is the engine core's.
    resident = evidence.resident_max_bytes
    values["host_memory_max_bytes"] = plain("resident_bytes") if resident is None else Value(value=resident)
    return values


def _power(evidence: Evidence, context: Context, values: dict[str, Value]) -> dict[str, Value]:
    """Return power and energy over the steady window."""
    names = ("power_mean_w", "energy_j_per_output_token", "energy_j_per_total_token")
    window, power = evidence.window, evidence.power
    if power is None or window is None or window.duration_s is None:
        return dict.fromkeys(names, missing("no power samples" if power is None else "the window is not known"))
    if len(power.gpus) != context.gpus:
        return dict.fromkeys(names, missing(f"{len(power.gpus)} GPUs were sampled, {context.gpus} served"))
    start = window.start_ns / 1e9
    energy = power.energy_j(start, start + window.duration_s)
    if isinstance(energy, str):
        return dict.fromkeys(names, missing(energy))
    found = {"power_mean_w": ratio(energy, window.duration_s, "")}
    for side in ("output", "total"):
        tokens = values[f"{side}_tok_per_s_per_gpu"].numerator
        found[f"energy_j_per_{side}_token"] = ratio(energy, tokens, "no token in the window")
    return found


# --------------------------------------------------------------------------------------------- command line
@reports_input_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Print a folder's metrics; returns 0, or 2 after an input error. The verdict is in the output, not the status."""
    parser = argparse.ArgumentParser(prog="python -m workflow.metrics", description="Measure a replay's artefacts.")
    parser.add_argument("folder", type=Path, help="client artefacts, with logs and Prometheus text beside them")
    parser.add_argument("--inferencex", action="store_true", help="print InferenceX's own aggregate instead")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs that served (default: 1)")
    parser.add_argument("--arm", help="backend that was declared; 'none' is the control (default: not judged)")
    parser.add_argument("--duration", type=float, help="requested window in seconds (default: the client's own)")
    parser.add_argument("--error-share", type=float, help="largest share of failed requests; InferenceX allows 0.10")
    options = parser.parse_args(arguments)
    limits = Limits() if options.error_share is None else Limits(error_share=options.error_share)
    context = Context(gpus=options.gpus, arm=options.arm, duration_s=options.duration, limits=limits)
    if options.inferencex:
        found = aggregate(read_evidence(options.folder, context), options.gpus)
        text = json.dumps(found, indent=2, allow_nan=False) + "\n"
    else:
        text = measure(options.folder, context).to_json()
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
