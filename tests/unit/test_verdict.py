"""Each reason why a point may not be published, on an artefact folder that shows it and one that does not."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.unit.arms import plan
from tests.unit.points import point
from tests.unit.test_adoption import a_run
from workflow import verdict
from workflow.config import Limits
from workflow.contract import Finding, Reason
from workflow.measured import context_for
from workflow.metrics import Context, measure


def reasons(attempt: Any, **context: Any) -> dict[Reason, str]:
    metrics = measure(attempt.write(), Context(**context))
    assert metrics.status == ("invalid" if metrics.findings else "ok")
    return {finding.code: finding.detail for finding in metrics.findings}


def test_a_clean_attempt_is_ok(attempt):
    assert reasons(attempt) == {}


def test_X28_nine_percent_errors_pass_only_with_inferencex_limit(attempt):
    error = {"type": "ServerDisconnectedError", "message": "gone"}
    for i in range(9):
        attempt.records[i * 10] = attempt.record(at=i * 10, seconds=0.1, error=error)
    found = reasons(attempt)
    assert found == {Reason.ERROR_SHARE: "9 of 100 requests failed (9.00%, limit 1.00%): ServerDisconnectedError 9"}
    assert reasons(attempt, limits=Limits(error_share=0.10)) == {}
    assert measure(attempt.folder, Context()).values["error_share"].value == pytest.approx(0.09)


def test_an_error_share_at_the_limit_is_allowed(attempt):
    attempt.records[0] = attempt.record(at=0, seconds=0.1, error="timeout: 600 s")
    assert Reason.ERROR_SHARE not in reasons(attempt)


def test_V19_one_success_of_500_is_not_a_result(attempt):
    attempt.records = [attempt.record(at=i / 5, seconds=0.1, error={"code": 500}) for i in range(499)]
    attempt.records.append(attempt.record(at=99, seconds=0.5))
    assert "499 of 500" in reasons(attempt)[Reason.ERROR_SHARE]


def test_no_answer_at_all(attempt):
    attempt.records = [attempt.record(at=1, seconds=0.1, error={"type": "ClientConnectorError"})]
    assert Reason.NO_REQUESTS in reasons(attempt)


@pytest.mark.parametrize(
    "change",
    [
        {"time_to_first_token": 0},
        {"time_to_first_token": -3.5},
        {"request_latency": 0},
        {"inter_token_latency": -1.0},
        {"time_to_first_token": 600.0},
        {"time_to_first_token": "inf"},
    ],
    ids=str,
)
def test_P13_impossible_latencies_are_named_and_left_out(attempt, change):
    clean = measure(attempt.write(), Context()).values["ttft_p50_s"].value
    attempt.records[5] = attempt.record(at=5, seconds=0.5, **change)
    assert list(reasons(attempt)) == [Reason.BAD_LATENCY]
    assert measure(attempt.folder, Context()).values["ttft_p50_s"].value == pytest.approx(clean, rel=0.01)


def test_P20_a_run_without_a_generated_token_is_invalid(attempt):
    attempt.records = [attempt.record(at=i, seconds=0.5, output_sequence_length=0) for i in range(100)]
    assert "100 of 100 answers had no token" in reasons(attempt)[Reason.ZERO_TOKENS]


def test_client_cancelled(attempt):
    attempt.summary["was_cancelled"] = True
    assert list(reasons(attempt)) == [Reason.CLIENT_CANCELLED]


@pytest.mark.parametrize("how", ["partial", "missing"])
def test_client_summary_incomplete(attempt, how):
    if how == "partial":
        attempt.summary["is_complete"] = False
    else:
        attempt.summary = None
    assert list(reasons(attempt, duration_s=100.0)) == [Reason.CLIENT_INCOMPLETE]


def test_the_fork_does_not_say_whether_it_is_complete_and_is_judged_by_its_count(attempt):
    del attempt.summary["is_complete"]
    assert reasons(attempt, duration_s=100.0) == {}
    attempt.summary["request_count"] = {"unit": "requests", "avg": 101.0}
    assert list(reasons(attempt, duration_s=100.0)) == [Reason.CLIENT_DISAGREES]


def test_window_short(attempt):
    attempt.phase_s = (0.0, 80.0)
    assert reasons(attempt)[Reason.WINDOW_SHORT] == "the profiling phase lasted 80.0 s of 100 s"


def test_activity_that_ends_early(attempt):
    attempt.records = attempt.records[:60]
    assert list(reasons(attempt)) == [Reason.COVERAGE]


def test_X25_one_long_stream_covers_the_end_although_nothing_starts_there(attempt):
    attempt.records = attempt.records[:20]
    attempt.records.append(attempt.record(at=15, seconds=400, time_to_first_token=100.0))
    assert Reason.COVERAGE not in reasons(attempt)


def test_warmup_that_runs_into_the_window(attempt):
    attempt.records.append(attempt.record(at=-5, seconds=12, benchmark_phase="warmup"))
    assert reasons(attempt)[Reason.WARMUP_NOT_DRAINED] == "warm-up requests ran 7.0 s into the profiling phase"


def sources(attempt: Any, computed: float, device: float, host: float) -> None:
    attempt.counter("vllm:prompt_tokens", 100_000)
    for source, total in (("local_compute", computed), ("local_cache_hit", device), ("external_kv_transfer", host)):
        attempt.counter("vllm:prompt_tokens_by_source", total, source=source)


def test_offload_that_gave_nothing_back_is_not_proven(attempt):
    sources(attempt, 50_000, 50_000, 0)
    found = reasons(attempt, arm="vllm-native")
    assert found[Reason.OFFLOAD_NOT_PROVEN] == "arm vllm-native: 0 prompt tokens from host"


def test_L5_stores_alone_do_not_prove_offload(attempt):
    sources(attempt, 50_000, 50_000, 0)
    attempt.counter("vllm:kv_offload_store_bytes", 1e9)
    attempt.counter("vllm:kv_offload_load_bytes", 0)
    assert Reason.OFFLOAD_NOT_PROVEN in reasons(attempt, arm="vllm-native")


def test_offload_that_nothing_could_show_is_not_proven(attempt):
    assert "no metric or log line" in reasons(attempt, arm="vllm-native")[Reason.OFFLOAD_NOT_PROVEN]


def test_offload_proven_by_tokens_from_host(attempt):
    sources(attempt, 20_000, 50_000, 30_000)
    assert reasons(attempt, arm="vllm-native") == {}


def test_offload_in_the_control(attempt):
    sources(attempt, 20_000, 50_000, 30_000)
    assert reasons(attempt, arm="none") == {Reason.OFFLOAD_IN_CONTROL: "the arm none saw 30000 prompt tokens from host"}


def fitting_device(attempt: Any, device: float, ceiling: float) -> None:
    """Let the device's own cache serve a share of the prompt tokens, and the trace allow another."""
    sources(attempt, 100_000 * (1 - device), 100_000 * device, 0)
    for record in attempt.records:
        record["metrics"]["usage_prompt_cache_read_tokens"] = {"value": round(1000 * device), "unit": "tokens"}
    attempt.summary["theoretical_prefix_cache_hit"] = {"unit": "%", "avg": 100 * ceiling}


UNPROVEN = "not seen to hold: prompt tokens were loaded from outside the device (tokens-restored)"


def test_a_tier_that_was_not_needed_is_no_failure_and_no_proof(attempt):
    fitting_device(attempt, device=0.8, ceiling=0.805)
    metrics = measure(attempt.write(), Context(arm="vllm-native", unproven_by_use=(UNPROVEN,)))
    assert metrics.status == "ok", metrics.findings
    (note,) = [note for note in metrics.notes if "nothing was left for the tier to give" in note]
    assert "held 80.0% of the prompt tokens and the sessions allow 80.5%" in note
    control = measure(attempt.write(), Context(arm="none"))
    assert not [note for note in control.notes if "nothing was left" in note]


@pytest.mark.parametrize(
    ("device", "ceiling"),
    [
        pytest.param(0.7, 0.81, id="much was left"),
        pytest.param(0.92, 0.939, id="little of all tokens was left, and a quarter of those that were computed"),
        pytest.param(0.9, 0.81, id="something leaked in"),
    ],
)
def test_a_tier_that_gave_nothing_beside_a_device_that_did_not_just_fit_is_not_proven(attempt, device, ceiling):
    fitting_device(attempt, device=device, ceiling=ceiling)
    found = reasons(attempt, arm="vllm-native", unproven_by_use=(UNPROVEN,), limits=Limits(above_ceiling=0.5))
    assert found == {Reason.OFFLOAD_NOT_PROVEN: "arm vllm-native: 0 prompt tokens from host"}


def test_what_the_log_does_not_prove_is_not_proven_whatever_counters_say(attempt):
    sources(attempt, 20_000, 50_000, 30_000)
    assert reasons(attempt, arm="vllm-native", unproven_by_use=(UNPROVEN,)) == {Reason.OFFLOAD_NOT_PROVEN: UNPROVEN}


def test_a_tier_that_was_written_through_says_so(attempt):
    sources(attempt, 50_000, 50_000, 0)
    attempt.counter("vllm:kv_offload_store_bytes", 144e9)
    attempt.counter("vllm:kv_offload_load_bytes", 0)
    found = reasons(attempt, arm="vllm-native", pinned_bytes=68_000_000_000)[Reason.OFFLOAD_NOT_PROVEN]
    assert "144 GB were stored into 68 GB: the sessions need more than the tier holds, or its lookups fail" in found
    found = reasons(attempt, arm="vllm-native", pinned_bytes=680_000_000_000)[Reason.OFFLOAD_NOT_PROVEN]
    assert "stored into" not in found


def test_control_without_offload_is_ok(attempt):
    sources(attempt, 50_000, 50_000, 0)
    assert reasons(attempt, arm="none") == {}


def test_P19_hit_share_above_the_ceiling(attempt):
    attempt.summary["theoretical_prefix_cache_hit"] = {"unit": "%", "avg": 70.0}
    assert "80.0% of the prompt tokens were cached, the trace allows 70.0%" in reasons(attempt)[Reason.ABOVE_CEILING]
    assert reasons(attempt, limits=Limits(above_ceiling=0.11)) == {}


def test_token_sources_that_do_not_add_up(attempt):
    sources(attempt, 20_000, 50_000, 20_000)
    assert reasons(attempt)[Reason.SHARES_DO_NOT_ADD_UP].endswith("0.900 in all")


def test_G13_a_counter_that_went_back(attempt):
    attempt.counter("vllm:prompt_tokens", -5.0)
    assert reasons(attempt)[Reason.COUNTER_RESET] == "vllm:prompt_tokens went back inside the window"


def test_restart_of_a_scraped_process(attempt):
    attempt.gauge("process_start_time_seconds", 1_796_000_000.0, 1_796_000_050.0)
    assert "started again" in reasons(attempt)[Reason.COUNTER_RESET]


def test_copy_rate_above_the_bus(attempt):
    attempt.counter("vllm:kv_offload_load_bytes", 70e9)
    attempt.counter("vllm:kv_offload_load_time", 1.0)
    assert reasons(attempt) == {Reason.COPY_RATE_ABOVE_BUS: "70.0 GB/s to the device, the bus carries 64 GB/s one way"}
    assert reasons(attempt, bus_limit_gb_per_s=128.0) == {}


def test_slow_copies_are_a_note(attempt):
    attempt.counter("vllm:kv_offload_load_bytes", 4e9)
    attempt.counter("vllm:kv_offload_load_time", 1.0)
    metrics = measure(attempt.write(), Context())
    assert metrics.status == "ok"
    assert "not pinned, blocks are small" in metrics.notes[0]


def test_P17_client_bound(attempt):
    attempt.records = [
        attempt.record(
            at=i, seconds=0.5, credit_issued_ns=attempt.record(at=i - 0.4, seconds=1)["metadata"]["request_start_ns"]
        )
        for i in range(100)
    ]
    assert "0.400 s late" in reasons(attempt)[Reason.CLIENT_BOUND]


def test_P4_fewer_traces_than_declared(attempt):
    log = attempt.client / "logs" / "aiperf.log"
    log.parent.mkdir()
    log.write_text("TrajectorySource: built 4 trajectories from 16 traces\n")
    assert reasons(attempt, traces_declared=393)[Reason.TRACES_MISSING] == "the client loaded 16 of 393 traces"
    assert reasons(attempt, traces_declared=16) == {}


def test_version_mismatch(attempt):
    assert Reason.VERSION_MISMATCH in reasons(attempt, client_version="0.12.0")
    assert reasons(attempt, client_version="0.13.0") == {}


def test_what_the_run_found_comes_first_and_is_not_repeated(attempt):
    attempt.summary["was_cancelled"] = True
    own = Finding(code=Reason.CLIENT_CANCELLED, detail="stopped by the watchdog")
    assert reasons(attempt, run_findings=(own,)) == {Reason.CLIENT_CANCELLED: "stopped by the watchdog"}


def test_M1_changed_answers_are_a_finding(attempt):
    before = [{"prompt": "one", "answer": "1"}, {"prompt": "two", "answer": "2"}]
    (attempt.folder / "probes.before.json").write_text(json.dumps(before))
    (attempt.folder / "probes.after.json").write_text(json.dumps(before))
    assert reasons(attempt) == {}
    (attempt.folder / "probes.after.json").write_text(json.dumps([before[0], {"prompt": "two", "answer": "@@"}]))
    assert "'two'" in reasons(attempt)[Reason.KV_INTEGRITY]


@pytest.mark.parametrize(
    "line",
    [
        "WARNING [offload] Cannot store blocks: pool exhausted",
        "Pin budget: 0 tokens (ratio=0.000)",
        "L1 OUT_OF_MEMORY: skip store of 12 chunks",
    ],
    ids=["V8", "M11", "L2"],
)
def test_V8_M11_L2_a_store_that_does_not_do_its_work(attempt, line):
    (attempt.folder / "engine.log").write_text("starting\n" + f"{line}\n" * 3)
    assert "(3 log lines)" in reasons(attempt)[Reason.DEGRADED]


def test_P16_P23_summary_that_disagrees_with_its_records(attempt):
    attempt.summary["time_to_first_token"] = {"unit": "ms", "avg": 150.0}
    assert "ttft_mean_s is 0.1500 in its summary and 0.1000" in reasons(attempt)[Reason.CLIENT_DISAGREES]
    attempt.summary["time_to_first_token"] = {"unit": "ms", "avg": 100.5}
    assert reasons(attempt) == {}


def test_P1_records_lost_between_the_client_and_its_file(attempt):
    attempt.summary["request_count"] = {"unit": "requests", "avg": 104.0}
    assert "counts 104 successful requests, its records hold 100" in reasons(attempt)[Reason.CLIENT_DISAGREES]


SENT = """\
00:53:19 - PhaseRunner - NOTICE - Phase agentic.warmup (warmup) sending complete | sent=15, completed=12
00:55:00 - PhaseRunner - NOTICE - Phase profiling (profiling) sending complete | sent={sent}, completed=9
00:55:09 - PhaseRunner - NOTICE - Phase profiling (profiling) complete | completed=9, cancelled={cancelled}
"""


@pytest.mark.parametrize(
    ("sent", "cancelled", "lost"), [(100, 0, False), (110, 0, True), (110, 10, False), (111, 9, True), (101, 0, False)]
)
def test_P8_P7_P19_every_request_that_was_sent_has_to_have_a_record(attempt, sent, cancelled, lost):
    log = attempt.client / "logs" / "aiperf.log"
    log.parent.mkdir()
    log.write_text(SENT.format(sent=sent, cancelled=cancelled))
    found = reasons(attempt)
    assert (Reason.REQUESTS_LOST in found) == lost
    metrics = measure(attempt.folder, Context())
    assert metrics.values["unrecorded_share"].value == pytest.approx((sent - 100) / sent)
    assert any("have no record" in note for note in metrics.notes) == (sent > 100)
    if (sent, cancelled) == (110, 0):
        assert found[Reason.REQUESTS_LOST].startswith("10 of 110 requests that the client sent have no record (9.09%,")


def test_P8_a_log_that_ends_early_says_nothing_about_what_was_sent(attempt):
    log = attempt.client / "logs" / "aiperf.log"
    log.parent.mkdir()
    log.write_text(SENT.partition("\n")[0])
    assert reasons(attempt) == {}
    reason = measure(attempt.folder, Context()).values["unrecorded_share"].null_reason
    assert reason == "the client's log does not say what it sent"


@pytest.mark.parametrize(("name", "sent"), [("llamacpp-none", 338), ("replay-streams-cut", 104), ("replay-refused", 2)])
def test_P8_real_clients_record_what_they_say_they_sent(artefacts, name, sent):
    share = measure(artefacts("replays") / name, Context()).values["unrecorded_share"]
    assert (share.numerator, share.denominator) == (0, sent)


def test_P8_a_real_client_that_was_cancelled_recorded_none_of_what_it_ended(artefacts):
    share = measure(artefacts("h200-agentx-pair") / "none", Context()).values["unrecorded_share"]
    assert (share.numerator, share.denominator) == (5, 19)


def test_V7_an_error_share_says_how_much_of_it_was_waiting(attempt):
    for i in range(4):
        attempt.records[i] = attempt.record(at=i, seconds=60, error={"type": "SocketTimeoutError", "message": "x"})
    assert reasons(attempt)[Reason.ERROR_SHARE].endswith("SocketTimeoutError 4; the client gave up on 4 of them")


def test_G4_servers_that_count_twice_what_the_client_sent(attempt):
    attempt.counter("vllm:prompt_tokens", 100_000, endpoint="http://a:1/metrics", engine="0")
    attempt.counter("vllm:prompt_tokens", 99_000, endpoint="http://a:2/metrics", engine="0")
    assert "counted 199000 prompt tokens, the client sent 100000" in reasons(attempt)[Reason.TOKENS_DISAGREE]


def test_G8_damaged_lines_above_a_thousandth(attempt):
    attempt.records.append('{"metadata": {"request_start')
    assert Reason.BAD_RECORDS in reasons(attempt)
    attempt.records = [attempt.record(at=i / 20, seconds=0.5) for i in range(2000)] + ['{"metadata": {"requ']
    assert Reason.BAD_RECORDS not in reasons(attempt)


def test_a_request_that_was_recorded_twice(attempt):
    for i, record in enumerate(attempt.records):
        record["metadata"]["x_request_id"] = f"id {i}"
    assert reasons(attempt) == {}
    attempt.records.append(attempt.records[7])
    assert "1 lines repeat a request" in reasons(attempt)[Reason.BAD_RECORDS]


def test_every_reason_that_the_verdict_gives_has_a_test_here():
    given = set(re.findall(r"Reason\.(\w+)", Path(verdict.__file__).read_text()))
    tested = set(re.findall(r"Reason\.(\w+)", Path(__file__).read_text()))
    assert given - tested == set()


def test_what_only_use_can_prove_is_left_to_the_verdict():
    arm = plan("minimaxm3-h100-vllm", "vllm-native")
    seen = {proof.name: False for proof in arm.proofs}
    run = a_run().model_copy(
        update={"proofs": seen, "findings": tuple(proof.unmet("vllm-native") for proof in arm.proofs)}
    )
    one = point().model_copy(update={"plan": arm, "arm": "vllm-native"})
    context = context_for(one, run, Limits())
    assert context.unproven_by_use == (UNPROVEN,)
    assert len(context.run_findings) == len(arm.proofs) - 1, "the connector was not created: no workload excuses that"
