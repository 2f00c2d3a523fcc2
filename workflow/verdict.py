"""Whether a measured point may be published, and why not. Pure: evidence and limits in, findings out."""

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain

import numpy as np

from workflow.contract import Finding, Reason
from workflow.definitions import PERCENTILES, TIERS, Value
from workflow.evidence import Context, Evidence
from workflow.readers.records import Records

CONTROL = "none"
UNREADABLE_SHARE = 0.001
"""Above this share of damaged lines the records are not a sample of the run any more."""
SHARES_TOLERANCE = 0.01
AGGREGATE_TOLERANCE = 0.01
SERVER_TOKENS = (0.9, 1.5)
"""Prompt tokens that the server counted / that the client sent: below, a server was not scraped; above, one twice."""
CLIENT_LAG_SHARE = 0.1
CLIENT_LAG_S = 0.05
WARMUP_OVERLAP_S = 1.0
SLOW_COPY_GB_PER_S = 10.0


def judge(evidence: Evidence, values: Mapping[str, Value], context: Context) -> list[Finding]:
    """Return one finding a reason, the run's own first; a reason that the run found already is not repeated."""
    found = list(context.run_findings)
    seen = {finding.code for finding in found}
    limits = context.limits
    for code, detail in chain(
        _answers(evidence, values, limits.error_share),
        _client(evidence, values, context),
        _window(evidence, values, limits.window_share),
        _offload(evidence, values, context),
        _tokens(evidence, values, limits.above_ceiling),
        _transfers(evidence, values, context.bus_limit_gb_per_s),
        _integrity(evidence),
    ):
        if code not in seen:
            seen.add(code)
            found.append(Finding(code=code, detail=detail))
    return found


FROZEN_SHARE = 0.05
"""Share of follow-up turns above which a backend loses stores; seen: 0 where it does not, 0.59 where it does."""


def remarks(evidence: Evidence, values: Mapping[str, Value], context: Context) -> Iterator[str]:
    """Yield what a reader should know although it does not make the point invalid."""
    for direction in ("host", "device"):
        rate = values[f"copy_rate_to_{direction}_gb_per_s"].value
        if rate is not None and rate < SLOW_COPY_GB_PER_S:
            yield (
                f"copies to the {direction} ran at {rate:.2f} GB/s: below {SLOW_COPY_GB_PER_S:.0f} GB/s memory is "
                "not pinned, blocks are small, or the path is a network"
            )
    if evidence.unrecorded is not None and evidence.unrecorded[0]:
        yield f"{evidence.unrecorded[0]} of {evidence.client_log.sent} requests that the client sent have no record"
    if context.arm not in (None, CONTROL) and not_needed(evidence, values):
        yield (
            f"nothing was left for the tier to give: the device's own cache held "
            f"{values['prompt_share_device'].value:.1%} of the prompt tokens and the sessions allow "
            f"{values['ceiling_share'].value:.1%}; this point says what the backend costs where it cannot help, not "
            "that it works"
        )
    failed_keys = evidence.amount("store_failed_keys")
    if failed_keys:
        yield f"the store failed to read or write {failed_keys:.0f} keys"
    log = evidence.log
    if log is not None and log.starts > 1:
        yield f"the engine's log shows {log.starts} starts; the KV pool size is the last one's"
    for one in evidence.logs:
        for says, count in one.suspect.items():
            yield f"{says} ({count} log lines)"
    yield from _gave_up(evidence, values)
    frozen = values["frozen_prefix_share"]
    if frozen.value is not None and frozen.value >= FROZEN_SHARE and frozen.numerator and frozen.numerator >= 3:
        yield (
            f"{frozen.numerator:.0f} of {frozen.denominator:.0f} follow-up turns found exactly as many cached tokens "
            "as the turn before, although that turn's prompt was longer: the backend lost stores (an eviction would "
            "have shortened the prefix)"
        )
    if _cold(evidence.records):
        yield "the first five requests were over five times slower than the median: the warm-up did not warm everything"


def _cold(records: Records) -> bool:
    """Say whether the median TTFT of the five requests sent first is over five times that of all."""
    starts, first = np.empty(0, np.int64), np.empty(0)
    for start, ttft in records.answered.parts("start_ns", "ttft_s"):
        known = np.isfinite(ttft)
        starts, first = np.append(starts, start[known]), np.append(first, ttft[known])
        earliest = np.argsort(starts, kind="stable")[:5]
        starts, first = starts[earliest], first[earliest]
    everything = records.answered["ttft_s"]
    everything = everything[np.isfinite(everything)]
    return everything.size >= 50 and bool(np.median(first) > 5 * np.median(everything, overwrite_input=True))


def _gave_up(evidence: Evidence, values: Mapping[str, Value]) -> Iterator[str]:
    """Say that a tail is longer than its percentiles, which only know the requests that were answered."""
    records = evidence.records
    share = values["timed_out_share"].value
    if not share:
        return
    start, end, gave_up = (records.unanswered[name] for name in ("start_ns", "end_ns", "gave_up"))
    start, end = start[gave_up == 1], end[gave_up == 1]
    waits = (end - start) / 1e9
    waited = f", after {waits.min():.1f} s at least" if waits.size else ""
    hidden = [name for name, percent in PERCENTILES.items() if share > 1 - percent / 100]
    reach = f"; with them {', '.join(hidden)} of TTFT and end-to-end time would be that long" if hidden else ""
    when = ""
    if start.size and evidence.window is not None:
        sent = (start - evidence.window.start_ns) / 1e9
        when = f"; they were sent {sent.min():.1f} s to {sent.max():.1f} s into the window"
    yield f"the client gave up waiting for {records.timed_out} requests ({share:.2%}){waited}{reach}{when}"


Raised = Iterator[tuple[Reason, str]]


def _answers(evidence: Evidence, values: Mapping[str, Value], limit: float) -> Raised:
    records = evidence.records
    if records.succeeded == 0:
        yield Reason.NO_REQUESTS, f"{records.failed} failed, {records.cancelled} cancelled, none succeeded"
    errors = values["error_share"]
    if errors.value is not None and errors.value > limit:
        kinds = ", ".join(f"{name} {count}" for name, count in records.profiled_error_categories.most_common(3))
        yield (
            Reason.ERROR_SHARE,
            f"{records.failed} of {errors.denominator:.0f} requests failed ({errors.value:.2%}, limit {limit:.2%}): "
            f"{kinds}" + (f"; the client gave up on {records.timed_out} of them" if records.timed_out else ""),
        )
    zero = values["zero_token_share"]
    if zero.value is not None and zero.value > limit:
        yield (
            Reason.ZERO_TOKENS,
            f"{zero.numerator:.0f} of {records.succeeded} answers had no token ({zero.value:.2%}, limit {limit:.2%})",
        )
    damaged = values["unreadable_share"]
    if damaged.value is not None and damaged.value > UNREADABLE_SHARE:
        yield (
            Reason.BAD_RECORDS,
            f"{records.unreadable} of {records.total} lines cannot be read (limit {UNREADABLE_SHARE:.1%})",
        )
    if records.repeated:
        yield Reason.BAD_RECORDS, f"{records.repeated} lines repeat a request: two attempts wrote into one file"
    impossible = _impossible(evidence)
    if impossible:
        yield Reason.BAD_LATENCY, ", ".join(f"{count} {what}" for what, count in impossible.items())


def _impossible(evidence: Evidence) -> dict[str, int]:
    """Count latencies that no request can have. They are left out of the statistics as well."""
    counts: Counter[str] = Counter()
    for ttft, e2e, itl, start, end in evidence.records.answered.parts("ttft_s", "e2e_s", "itl_s", "start_ns", "end_ns"):
        kinds = {
            "TTFT of 0, below 0 or infinite": ~np.isnan(ttft) & ~((ttft > 0) & np.isfinite(ttft)),
            "end-to-end time of 0, below 0 or infinite": ~np.isnan(e2e) & ~((e2e > 0) & np.isfinite(e2e)),
            "inter-token latency below 0": itl < 0,
            "TTFT after the end of its request": ttft > e2e * 1.001 + 1e-6,
            "end before start": end < start,
        }
        counts.update({what: int(np.sum(those)) for what, those in kinds.items()})
    return {what: count for what, count in counts.items() if count}


def _client(evidence: Evidence, values: Mapping[str, Value], context: Context) -> Raised:
    summary, records = evidence.summary, evidence.records
    if summary.was_cancelled:
        yield Reason.CLIENT_CANCELLED, "the client was stopped before its window and drain were over"
    if summary.is_complete is False:
        yield Reason.CLIENT_INCOMPLETE, "the client says that its summary is partial"
    # agentx-harness has no `is_complete`; whether its records are all there is seen from its own count, below.
    elif records.wall_clock and summary.is_complete is None and summary.was_cancelled is None:
        yield Reason.CLIENT_INCOMPLETE, "; ".join(("the client wrote no complete summary", *evidence.damaged))
    elif evidence.damaged:
        yield Reason.CLIENT_INCOMPLETE, "; ".join(evidence.damaged)
    if context.client_version and summary.client_version and context.client_version != summary.client_version:
        yield Reason.VERSION_MISMATCH, f"client {summary.client_version} ran, {context.client_version} was declared"
    yield from _lost(evidence, context.limits.error_share)
    loaded, declared = evidence.client_log.traces, context.traces_declared
    if loaded is not None and declared is not None and loaded < declared:
        yield Reason.TRACES_MISSING, f"the client loaded {loaded} of {declared} traces"
    differing = list(_disagreements(evidence, values))
    if differing:
        yield Reason.CLIENT_DISAGREES, "; ".join(differing)
    lag, ttft = values["client_lag_p95_s"].value, values["ttft_p50_s"].value
    if lag is not None and ttft is not None and lag > max(CLIENT_LAG_S, CLIENT_LAG_SHARE * ttft):
        yield (
            Reason.CLIENT_BOUND,
            f"the client sent requests {lag:.3f} s late (p95) beside a TTFT p50 of {ttft:.3f} s: it measures itself",
        )


def _lost(evidence: Evidence, limit: float) -> Raised:
    """Compare what was sent with what was recorded: a request without a record is in no error share either."""
    sent = evidence.client_log.sent
    if evidence.unrecorded is None or not sent or evidence.summary.was_cancelled:
        return
    lost = evidence.unrecorded[1]
    if lost > limit * sent:
        yield (
            Reason.REQUESTS_LOST,
            f"{lost} of {sent} requests that the client sent have no record ({lost / sent:.2%}, limit {limit:.2%}): "
            "they were lost, or dropped as longer than the context",
        )


def _disagreements(evidence: Evidence, values: Mapping[str, Value]) -> Iterator[str]:
    """Compare the client's own aggregate with ours from its records: records may be lost between the two."""
    summary = evidence.summary
    count = summary.statistic("request_count")
    if count is not None and count != evidence.records.succeeded:
        yield f"it counts {count:.0f} successful requests, its records hold {evidence.records.succeeded}"
    for tag, name in (("time_to_first_token", "ttft_mean_s"), ("request_latency", "e2e_mean_s")):
        theirs, ours = summary.statistic(tag), values[name].value
        if theirs is None or ours is None:
            continue
        theirs /= 1e3
        if abs(theirs - ours) > AGGREGATE_TOLERANCE * ours:
            yield f"{name} is {theirs:.4f} in its summary and {ours:.4f} from its records"


def _window(evidence: Evidence, values: Mapping[str, Value], least: float) -> Raised:
    records, window = evidence.records, evidence.window
    if window is None or window.duration_s is None:
        return
    length = evidence.phase_s
    if length is not None and length < least * window.duration_s:
        yield Reason.WINDOW_SHORT, f"the profiling phase lasted {length:.1f} s of {window.duration_s:.0f} s"
    span = values["activity_span_share"]
    if span.value is not None and span.value < least:
        yield (
            Reason.COVERAGE,
            f"the last request activity was {span.numerator:.1f} s into a window of {window.duration_s:.0f} s",
        )
    if records.last_warmup_end_ns is not None:
        over = (records.last_warmup_end_ns - window.start_ns) / 1e9
        if over > WARMUP_OVERLAP_S:
            yield Reason.WARMUP_NOT_DRAINED, f"warm-up requests ran {over:.1f} s into the profiling phase"


def loads(evidence: Evidence) -> dict[str, float]:
    """Return every sign that KV came back from a tier behind the device, as {what: amount}, zeros included."""
    signs: dict[str, float] = {}
    for quantity, what in (
        ("tokens_from_host", "prompt tokens from host"),
        ("tokens_from_storage", "prompt tokens from storage"),
        ("external_hits", "external prefix cache hits"),
        ("bytes_to_device", "bytes copied to the device"),
    ):
        amount = evidence.amount(quantity)
        if amount is not None:
            signs[what] = amount
    if evidence.log is not None and (evidence.log.verbose or evidence.log.restored_from_host):
        signs["prompts restored from the host cache"] = float(evidence.log.restored_from_host)
    return signs


NOTHING_LEFT = 0.05
"""The largest share of the computed prompt tokens that a tier could have saved where nothing was left for it."""


def not_needed(evidence: Evidence, values: Mapping[str, Value]) -> bool:
    """Tell whether nothing was left for a tier to give, since the device's own cache reached the ceiling."""
    device, ceiling = values["prompt_share_device"].value, values["ceiling_share"].value
    idle = not any(amount > 0 for amount in loads(evidence).values())
    # Above the ceiling something leaked in, which is no sign of a fitting device.
    if not idle or device is None or not ceiling:
        return False
    return abs(ceiling - device) <= NOTHING_LEFT * (1 - device)


def _offload(evidence: Evidence, values: Mapping[str, Value], context: Context) -> Raised:
    arm = context.arm
    for log in evidence.logs:
        for says, count in log.broken.items():
            yield Reason.DEGRADED, f"{says} ({count} log lines)"
    if arm is None:
        return
    signs = loads(evidence)
    if arm == CONTROL:
        stored = evidence.amount("bytes_to_host")
        if stored is not None:
            signs["bytes copied to the host"] = stored
        if evidence.log is not None and evidence.log.saved_to_host:
            signs["prompts saved to the host cache"] = float(evidence.log.saved_to_host)
        active = [f"{amount:.0f} {what}" for what, amount in signs.items() if amount > 0]
        if active:
            yield Reason.OFFLOAD_IN_CONTROL, f"the arm {CONTROL} saw {', '.join(active)}"
    elif not_needed(evidence, values):
        return
    elif not any(amount > 0 for amount in signs.values()):
        # Offload that never gives anything back is not "0 %": the working set was larger, or the store is broken.
        seen = ", ".join(f"0 {what}" for what in signs) or "no metric or log line could show it"
        yield Reason.OFFLOAD_NOT_PROVEN, f"arm {arm}: {seen}{_written_through(evidence, values)}"
    elif context.unproven_by_use:
        yield Reason.OFFLOAD_NOT_PROVEN, "; ".join(context.unproven_by_use)


def _written_through(evidence: Evidence, values: Mapping[str, Value]) -> str:
    """Say how often a tier that gave nothing was filled, where its size and what was stored are known."""
    stored, capacity = evidence.amount("bytes_to_host"), values["host_kv_capacity_bytes"].value
    if not stored or not capacity or stored <= capacity:
        return ""
    return (
        f"; {stored / 1e9:.0f} GB were stored into {capacity / 1e9:.0f} GB: the sessions need more than the tier "
        "holds, or its lookups fail (a lower concurrency tells which)"
    )


def _tokens(evidence: Evidence, values: Mapping[str, Value], above: float) -> Raised:
    measured, ceiling = values["cached_share"].value, values["ceiling_share"].value
    if measured is not None and ceiling is not None and measured > ceiling + above:
        yield (
            Reason.ABOVE_CEILING,
            f"{measured:.1%} of the prompt tokens were cached, the trace allows {ceiling:.1%} (+{above:.0%}): warm-up "
            "or an earlier pass leaked in, or counters are doubled",
        )
    shares = {tier: values[f"prompt_share_{tier}"] for tier in TIERS}
    known = {tier: share.value for tier, share in shares.items() if share.value is not None}
    if shares["device"].value is not None and shares["computed"].value is not None:
        total = sum(known.values())
        if abs(total - 1) > SHARES_TOLERANCE or min(known.values()) < 0:
            listed = ", ".join(f"{tier} {value:.3f}" for tier, value in known.items())
            yield Reason.SHARES_DO_NOT_ADD_UP, f"{listed}: {total:.3f} in all"
    if evidence.sources is not None and measured is not None:
        client = evidence.client_cached_share
        # A request at either end of the window may be in the log's window and not among the answers, or the reverse.
        inputs = evidence.records.answered["input_tokens"]
        edges = 2 * float(np.nanmax(inputs, initial=0.0)) / max(1.0, float(np.nansum(inputs)))
        if client is not None and abs(client - measured) > SHARES_TOLERANCE + edges:
            yield (
                Reason.SHARES_DO_NOT_ADD_UP,
                f"the engine's log has {measured:.3f} of the prompt tokens cached, the answers say {client:.3f}",
            )
    sent = float(np.nansum(evidence.records.answered["input_tokens"]))
    counted = evidence.window_amount("prompt_tokens")
    whole = evidence.records.failed == 0 and evidence.records.cancelled == 0 and not evidence.summary.was_cancelled
    if counted is not None and sent > 0 and whole:
        low, high = SERVER_TOKENS
        if not low <= counted / sent <= high:
            yield (
                Reason.TOKENS_DISAGREE,
                f"servers counted {counted:.0f} prompt tokens, the client sent {sent:.0f}: a server is scraped twice "
                "or not at all",
            )


def _transfers(evidence: Evidence, values: Mapping[str, Value], limit: float) -> Raised:
    for direction in ("host", "device"):
        rate = values[f"copy_rate_to_{direction}_gb_per_s"].value
        if rate is not None and rate > limit:
            yield (
                Reason.COPY_RATE_ABOVE_BUS,
                f"{rate:.1f} GB/s to the {direction}, the bus carries {limit:.0f} GB/s one way",
            )
    for what in evidence.resets():
        yield Reason.COUNTER_RESET, what


def _integrity(evidence: Evidence) -> Raised:
    if evidence.changed_answers:
        yield (
            Reason.KV_INTEGRITY,
            f"{len(evidence.changed_answers)} probe prompts were answered differently after the replay, first: "
            f"{evidence.changed_answers[0][:80]!r}",
        )
