"""Values, on written folders where the right number is known, and on the real artefacts beside the checkout."""

import json
import shutil

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.conftest import START_S
from workflow import measured
from workflow.config import Limits
from workflow.contract import Finding, InputError, Reason
from workflow.definitions import DEFINITIONS, MINIMUM_SAMPLES
from workflow.evidence import read_evidence
from workflow.measured import table, write_requests
from workflow.metrics import Accounting, Context, PointMetrics, _statistics, main, measure
from workflow.readers.server_logs import PINNED_LATE, read_engine_log
from workflow.watch import append_gzip, sample


def values(attempt, **context):
    return measure(attempt.write(), Context(**context)).values


def test_every_definition_has_a_value_or_a_reason(attempt):
    found = values(attempt)
    assert list(found) == list(DEFINITIONS)
    for name, one in found.items():
        assert (one.value is None) == bool(one.null_reason), name


def test_the_document_survives_writing_and_reading(attempt, tmp_path):
    metrics = measure(attempt.write(), Context(point="p-1"))
    metrics.write(tmp_path / "p-1.json")
    assert PointMetrics.read(tmp_path / "p-1.json") == metrics


def test_statistics_of_known_requests(attempt):
    found = values(attempt)
    assert found["ttft_p50_s"].value == pytest.approx(0.1)
    assert found["tpot_p50_s"].value == pytest.approx(0.4 / 9)
    assert found["e2e_interactivity_p50_tok_per_s"].value == pytest.approx(20)
    assert found["ttft_p50_s"].samples == 100


def test_X16_interactivity_is_one_over_the_statistic_of_itl(attempt):
    for i, record in enumerate(attempt.records):
        record["metrics"]["inter_token_latency"]["value"] = float(i + 1)
    found = values(attempt)
    itl = np.arange(1, 101) / 1e3
    assert found["interactivity_p90_tok_per_s"].value == pytest.approx(1 / np.percentile(itl, 90))
    assert found["interactivity_p90_tok_per_s"].value != pytest.approx(np.percentile(1 / itl, 90), rel=0.5)


def test_X17_the_three_interactivities_have_names_of_their_own(attempt):
    found = values(attempt)
    assert found["full_response_interactivity_p50_tok_per_s"].value is None
    assert found["interactivity_p50_tok_per_s"].value == pytest.approx(9 / 0.4)


@pytest.mark.parametrize(("n", "p90", "p95", "p99"), [(19, 0, 0, 0), (20, 1, 0, 0), (71, 1, 1, 0), (1000, 1, 1, 1)])
def test_G10_a_percentile_needs_requests_beyond_it(n, p90, p95, p99):
    data = np.linspace(1, 2, n)
    known = [_statistics(data, [name])[name].value is not None for name in ("p90", "p95", "p99")]
    assert known == [bool(p90), bool(p95), bool(p99)]
    if not p99:
        assert _statistics(data, ["p99"])["p99"].null_reason == f"{n} requests; p99 needs 200"


def test_G1_an_empty_percentile_is_null_with_no_samples():
    assert _statistics(np.empty(0), ["p95"])["p95"].model_dump() == {
        "value": None,
        "null_reason": "no request has it",
        "samples": 0,
        "numerator": None,
        "denominator": None,
    }


def test_G2_P11_a_missing_ttft_is_null_never_zero(attempt):
    attempt.records = [attempt.record(at=i, seconds=0.5, time_to_first_token=None) for i in range(100)]
    found = values(attempt)
    assert found["ttft_p50_s"].value is None
    assert found["e2e_p50_s"].value == pytest.approx(0.5)


def test_X11_G17_P14_accounting(attempt):
    attempt.records += [attempt.record(at=5, seconds=1, error={"code": 500}) for _ in range(2)]
    attempt.records += [attempt.record(at=-9, seconds=1, benchmark_phase="warmup", error="boom: z")]
    metrics = measure(attempt.write(), Context())
    counts = metrics.accounting.model_dump()
    assert counts.pop("records_total") == sum(counts.values()) == 103
    assert (counts["succeeded"], counts["failed"], counts["warmup_failed"]) == (100, 2, 1)
    assert metrics.error_categories == {"500": 2}
    assert metrics.values["error_share"].value == pytest.approx(2 / 102)


def test_G16_a_straggler_stretches_inferencex_window_and_not_ours(attempt):
    before = values(attempt)
    attempt.records.append(attempt.record(at=99.5, seconds=300, time_to_first_token=100.0))
    after = values(attempt)
    ours, theirs = "output_tok_per_s_per_gpu", "inferencex_output_tok_per_s_per_gpu"
    assert after[ours].value == pytest.approx(before[ours].value, rel=0.01)
    assert after[theirs].value < 0.3 * before[theirs].value
    assert after["drain_s"].value == pytest.approx(299.5)


def test_P14_tokens_of_a_stream_count_where_they_were_made(attempt):
    record = attempt.record(at=90, seconds=21, time_to_first_token=1000.0, output_sequence_length=201)
    attempt.records = [record]
    found = values(attempt, duration_s=100.0)
    # First token at 91 s, 200 more until 111 s: 1 + 200 * 9 / 20 inside the window, the rest in the drain.
    assert found["output_tok_per_s_per_gpu"].numerator == pytest.approx(91)
    assert found["drain_output_tok_per_s_per_gpu"].numerator == pytest.approx(110)
    assert found["input_tok_per_s_per_gpu"].numerator == 1000
    assert found["achieved_concurrency_mean"].value == pytest.approx(0.1)


def test_G11_rates_are_per_gpu_of_the_allocation(attempt):
    one, eight = values(attempt), values(attempt, gpus=8)
    for name in ("output_tok_per_s_per_gpu", "inferencex_total_tok_per_s_per_gpu"):
        assert eight[name].value == pytest.approx(one[name].value / 8)


def test_P19_achieved_concurrency_counts_failed_requests_too(attempt):
    attempt.records = [attempt.record(at=0, seconds=50), attempt.record(at=0, seconds=50, error={"code": 500})]
    found = values(attempt)
    assert found["achieved_concurrency_mean"].value == pytest.approx(1.0)
    assert found["busy_share"].value == pytest.approx(0.5)


def test_without_a_requested_duration_steady_rates_are_null(attempt):
    attempt.summary["input_config"] = {}
    found = values(attempt)
    assert found["output_tok_per_s_per_gpu"].null_reason == "the requested duration is not known"
    assert found["inferencex_output_tok_per_s_per_gpu"].value is not None


# ------------------------------------------------------------------------------------- kinds of public reports
def test_V7_requests_that_wait_till_the_clients_time_out_are_a_class_of_their_own(attempt):
    for i in (60, 61, 62):
        attempt.records[i] = attempt.record(at=i, seconds=600, error={"type": "TimeoutError", "message": "x"})
    attempt.records[63] = attempt.record(at=63, seconds=1, error={"code": 504, "type": "Gateway Timeout"})
    metrics = measure(attempt.write(), Context(limits=Limits(error_share=0.1)))
    assert metrics.status == "ok"
    assert (metrics.accounting.failed, metrics.values["timed_out_share"].numerator) == (4, 3)
    assert metrics.values["e2e_p90_s"].value == pytest.approx(0.5)
    assert metrics.notes == (
        "the client gave up waiting for 3 requests (3.00%), after 600.0 s at least; with them p99 of TTFT and "
        "end-to-end time would be that long; they were sent 60.0 s to 62.0 s into the window",
    )


def test_V7_without_a_time_out_nothing_is_said(attempt):
    attempt.records[63] = attempt.record(at=63, seconds=1, error={"code": 504, "type": "Gateway Timeout"})
    metrics = measure(attempt.write(), Context())
    assert metrics.values["timed_out_share"].value == 0
    assert metrics.notes == ()


def test_V7_the_deadline_of_a_real_client_is_a_time_out(artefacts):
    metrics = measure(artefacts("h200-vllm-0.25.1") / "mooncake", Context())
    assert metrics.values["timed_out_share"].numerator == metrics.accounting.failed == 16


def test_P19_many_requests_of_few_prompts_are_told_from_many_prompts(attempt):
    assert values(attempt)["unique_prompts"].value == 100
    for i, line in enumerate(attempt.records):
        line["metadata"] |= {"turn_index": i % 7, "root_correlation_id": f"play {i // 7}", "conversation_id": "trace_0"}
    found = values(attempt)["unique_prompts"]
    assert (found.value, found.samples) == (7, 100)


def test_V11_the_time_to_ready_is_a_metric_and_unknown_is_null(attempt):
    assert values(attempt, startup_s=55.4)["startup_s"].value == 55.4
    assert values(attempt)["startup_s"].null_reason == "the run did not record it"


ANSWERED = '(APIServer pid=7) INFO:     127.0.0.1:4242 - "POST /v1/chat/completions HTTP/1.1" 200 OK'
STORED = "[2026-12-01 02:25:44,764] LMCache INFO: Stored 8192 tokens in 0.183 seconds (lmcache_driven_transfer.py:1136)"


@pytest.mark.parametrize(
    ("line", "work", "says"),
    [
        (
            "(Worker pid=9) DEBUG 12-01 09:00:58 [gpu_worker.py:140] Host-registered mmap region rank=0 549.70 GB",
            ANSWERED,
            "still",
        ),
        (
            "(Worker pid=9) DEBUG 12-01 09:00:58 [gpu_worker.py:140] cudaHostRegister rank=0 549.70 GB",
            ANSWERED,
            "still",
        ),
        (
            "(Worker pid=9) INFO 12-01 09:00:58 [gpu_worker.py:612] Completed CPU memory pinning: 64 tensors pinned in "
            "55.412 s",
            ANSWERED,
            "still",
        ),
        (
            "[2026-12-01 02:25:04,755] LMCache INFO: LazyMemoryAllocator: Expanded 10240 MB pinned memory, now total "
            "is 30720 MB / 65536 MB (46.9%) (lazy_memory_allocator.py:300)",
            STORED,
            "still",
        ),
        (
            "(Worker pid=9) WARNING 12-01 09:00:58 [x.py:1] cudaHostRegister failed for rank=1 (code=1)",
            ANSWERED,
            "not be pinned",
        ),
    ],
    ids=["registered", "older", "in the background", "LMCache", "failed"],
)
def test_V11_copies_from_memory_that_is_not_pinned_are_a_note(attempt, line, work, says):
    log = attempt.folder / "engine.log"
    attempt.write()
    for text, expected in ((f"{work}\n{line}\n", 1), (f"{line}\n{work}\n", 0 if says == "still" else 1)):
        log.write_text(text)
        notes = measure(attempt.folder, Context()).notes
        assert sum(says in note for note in notes) == len(notes) == expected


def test_V11_real_logs_in_which_pinning_was_over_before_the_first_request(artefacts):
    folder = artefacts("h200-vllm-0.25.1")
    logs = [folder / "lmcache-mp" / "lmcache.log", folder / "mooncake" / "vllm.log"]
    assert "Expanded 10240 MB pinned memory" in logs[0].read_text()
    assert all(PINNED_LATE not in read_engine_log(path).suspect for path in logs)


def test_host_memory_is_that_of_all_processes_and_not_of_the_one_that_is_scraped(attempt):
    attempt.gauge("process_resident_memory_bytes", 1e9, 3e9)
    lines = [
        '{"unix_s": 1.0, "rss_bytes": {"engine": 60, "lmcache-0": 5, "client": 900}}',
        '{"unix_s": 2.0, "rss_bytes": {"engine": 50, "lmcache-0": 20, "client": 900}}',
        '{"unix_s": 3.0, "rss_by',
    ]
    (attempt.folder / "node.jsonl").write_text("\n".join(lines))
    assert values(attempt)["host_memory_max_bytes"].value == 70


def test_X14_a_gauge_gives_its_maximum_and_its_name_says_so(attempt):
    attempt.gauge("vllm:kv_cache_usage_perc", 0.1, 0.9, engine="0")
    attempt.gauge("vllm:kv_cache_usage_perc", 0.2, 0.4, engine="1")
    attempt.gauge("process_resident_memory_bytes", 1e9, 3e9)
    attempt.gauge("master_allocated_bytes", 1e9, 6e9)
    attempt.gauge("master_total_capacity_bytes", 8e9, 8e9)
    found = values(attempt)
    assert found["device_kv_use_max_share"].value == 0.9
    assert found["host_memory_max_bytes"].value == 3e9
    use, used, size = (found[f"host_kv_{name}"].value for name in ("use_max_share", "used_max_bytes", "capacity_bytes"))
    assert use == used / size == 0.75
    for name, one in DEFINITIONS.items():
        assert ("_max_" in name) == one.formula.startswith("highest"), name


def test_X14_the_fill_of_several_engines_is_that_of_the_fullest_whoever_divides(attempt):
    for rank, used in (("0", 90.0), ("1", 10.0)):
        attempt.gauge("sglang:token_usage", 0.0, used / 100, tp_rank=rank)
        attempt.gauge("sglang:hicache_host_used_tokens", 0.0, used, tp_rank=rank)
        attempt.gauge("sglang:hicache_host_total_tokens", 100.0, 100.0, tp_rank=rank)
    found = values(attempt)
    assert found["device_kv_use_max_share"].value == found["host_kv_use_max_share"].value == 0.9


def sidecar(attempt, name, moment, used_bytes, looked_up, hit):
    """Write a scrape of an LMCache server: to `before` or `after`, or as a sample at a second of the window."""
    text = (
        f"# TYPE lmcache_mp_l1_memory_usage_bytes gauge\nlmcache_mp_l1_memory_usage_bytes {used_bytes}\n"
        f"# TYPE lmcache_mp_lookup_requested_tokens counter\nlmcache_mp_lookup_requested_tokens_total {looked_up}\n"
        f"# TYPE lmcache_mp_lookup_hit_tokens counter\nlmcache_mp_lookup_hit_tokens_total {hit}\n"
    )
    folder = attempt.folder / "metrics"
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(moment, str):
        (folder / f"{name}.{moment}.prom").write_text(text)
    else:
        append_gzip(folder / f"{name}.samples.prom.gz", sample(START_S + moment, text.encode()))


def test_servers_of_one_kind_are_added_up_and_never_to_the_engine(attempt):
    # Ranks that do the same work have equal counters, and are still servers of their own.
    for rank in range(8):
        sidecar(attempt, f"lmcache-{rank}-http", "before", 0, 0, 0)
        sidecar(attempt, f"lmcache-{rank}-http", "after", 1e9, 100, 25 if rank < 4 else 75)
    for name, line in (
        ("engine", 'vllm:mooncake_store_operation_bytes_total{operation="load_get"} 7'),
        ("mooncake-metrics", "mem_cache_hit_bytes_total 7"),
    ):
        (attempt.folder / f"metrics/{name}.before.prom").write_text("")
        (attempt.folder / f"metrics/{name}.after.prom").write_text(line + "\n")
    found = values(attempt)
    assert found["host_kv_used_max_bytes"].value == 8e9
    hits = found["store_hit_share_of_lookups"]
    assert (hits.numerator, hits.denominator) == (400, 800)
    assert found["transfer_to_device_bytes"].value == 7


def test_X11_sidecars_are_counted_over_the_phase_that_the_clients_export_is_of(attempt):
    for moment, *counts in (
        ("before", 0, 0, 0),
        (-20, 1e9, 500, 0),
        (-1, 2e9, 1000, 0),
        (50, 3e9, 1400, 100),
        (101, 4e9, 2000, 800),
        (120, 5e9, 2600, 800),
        ("after", 6e9, 3000, 800),
    ):
        sidecar(attempt, "lmcache-0-http", moment, *counts)
    found = values(attempt)
    hits = found["store_hit_share_of_lookups"]
    assert (hits.numerator, hits.denominator) == (800, 1000)
    assert found["host_kv_used_max_bytes"].value == 4e9


def test_P7_a_request_that_the_client_dropped_as_too_long_is_a_failure_with_its_name(attempt):
    attempt.records[5] = attempt.record(at=5, seconds=0.1, context_overflow_skip=True)
    metrics = measure(attempt.write(), Context())
    assert (metrics.accounting.failed, metrics.error_categories) == (1, {"context_overflow_skip": 1})
    assert metrics.accounting.succeeded == 99


@pytest.mark.parametrize("name", ["profile_export_aiperf.json", "server_metrics_export.json"])
def test_P7_what_a_client_that_was_ended_left_is_still_read(attempt, name):
    attempt.counter("vllm:num_preemptions", 3.0)
    folder = attempt.write()
    whole = (attempt.client / name).read_text()
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        (attempt.client / name).write_text(whole[:length])
        metrics = measure(folder, Context(duration_s=100.0))
        (finding,) = metrics.findings
        assert finding.code == Reason.CLIENT_INCOMPLETE
        assert f"{name} is cut off or damaged" in finding.detail
        assert metrics.accounting.succeeded == 100
        assert metrics.values["output_tok_per_s_per_gpu"].value == pytest.approx(10, rel=0.02)
        known = metrics.values["preemptions"].value is not None
        assert known == (name == "profile_export_aiperf.json")


def test_P7_nothing_was_recorded_before_the_client_was_ended(attempt):
    attempt.records, attempt.summary = [], None
    metrics = measure(attempt.write(), Context())
    assert {finding.code for finding in metrics.findings} == {Reason.NO_REQUESTS, Reason.CLIENT_INCOMPLETE}
    assert len(requests_of(attempt)) == 0


def test_P10_the_warm_up_is_in_no_latency(attempt):
    clean = values(attempt)
    attempt.records += [attempt.record(at=-90 + i, seconds=42, benchmark_phase="warmup") for i in range(5)]
    found = values(attempt)
    assert found["ttft_p95_s"] == clean["ttft_p95_s"]
    assert found["ttft_p50_s"].samples == 100


@pytest.mark.parametrize(("slow_s", "notes"), [(42.0, 1), (0.5, 0)])
def test_P10_first_requests_that_are_slow_after_the_warm_up_are_a_note(attempt, slow_s, notes):
    for i in range(5):
        attempt.records[i] = attempt.record(at=i, seconds=slow_s)
    # The order of the file is that of the ends, so the slow ones stand behind others in it.
    attempt.records = attempt.records[5:60] + attempt.records[:5] + attempt.records[60:]
    metrics = measure(attempt.write(), Context())
    assert sum("first five requests" in note for note in metrics.notes) == len(metrics.notes) == notes


@pytest.mark.parametrize(("failed", "notes"), [(0.0, 0), (7.0, 1)])
def test_M16_keys_that_a_store_could_not_read_or_write_are_said(attempt, failed, notes):
    attempt.counter("vllm:mooncake_store_operation_failed_keys", failed, operation="load_get")
    metrics = measure(attempt.write(), Context())
    assert sum("7 keys" in note for note in metrics.notes) == len(metrics.notes) == notes


# ------------------------------------------------------------------------------------------ prompt sources
def test_shares_and_the_conditional_rate_have_names_of_their_own(attempt):
    attempt.counter("vllm:prompt_tokens", 6000)
    for source, total in {"local_compute": 1500, "local_cache_hit": 3500, "external_kv_transfer": 1000}.items():
        attempt.counter("vllm:prompt_tokens_by_source", total, source=source)
    attempt.counter("vllm:external_prefix_cache_hits", 1000)
    attempt.counter("vllm:external_prefix_cache_queries", 2500)
    found = values(attempt)
    assert found["prompt_share_host"].value == pytest.approx(1 / 6)
    assert found["host_hit_share_of_misses"].value == pytest.approx(0.4)
    assert found["store_hit_share_of_lookups"].value == pytest.approx(0.4)
    assert found["cached_share"].value == pytest.approx(0.75)
    assert found["prompt_share_storage"].value is None


def test_V13_numerator_and_denominator_are_kept(attempt):
    attempt.counter("vllm:external_prefix_cache_hits", 10)
    attempt.counter("vllm:external_prefix_cache_queries", 40)
    one = values(attempt)["store_hit_share_of_lookups"]
    assert (one.numerator, one.denominator, one.value) == (10, 40, 0.25)


def test_X13_a_hit_share_is_weighted_by_tokens(attempt):
    attempt.counter("vllm:prompt_tokens", 1000, role="prefill")
    for role, hit, computed in (("prefill", 900, 100), *((f"decode{i}", 0, 0) for i in range(7))):
        attempt.counter("vllm:prompt_tokens_by_source", hit, source="local_cache_hit", role=role)
        attempt.counter("vllm:prompt_tokens_by_source", computed, source="local_compute", role=role)
    assert values(attempt)["prompt_share_device"].value == pytest.approx(0.9)


def test_V16_retried_lookups_are_no_hit_share(attempt):
    attempt.counter("vllm:prefix_cache_queries", 34_500_000)
    attempt.counter("vllm:prefix_cache_hits", 3_300_000)
    found = values(attempt)
    assert found["cached_share"].value == pytest.approx(0.8)
    assert found["prefix_hit_share_of_attempts"].value == pytest.approx(3.3 / 34.5)


@pytest.mark.parametrize("answers_say", [True, False], ids=["usage", "times"])
def test_V14_a_hit_counter_that_stays_0_is_suspect_and_null(attempt, answers_say):
    attempt.counter("vllm:prompt_tokens", 100_000)
    attempt.counter("vllm:prompt_tokens_by_source", 0, source="local_cache_hit")
    attempt.counter("vllm:prompt_tokens_by_source", 100_000, source="local_compute")
    if not answers_say:
        attempt.records = [
            attempt.record(
                at=i, seconds=2, turn_index=i % 4, time_to_first_token=1500.0 if i % 4 == 0 else 90.0,
                usage_prompt_cache_read_tokens=None,
            )
            for i in range(100)
        ]  # fmt: skip
    found = values(attempt)
    assert found["prompt_share_device"].value is None
    assert "the counter is suspect" in found["prompt_share_device"].null_reason
    cached = found["cached_share"].value
    assert cached == pytest.approx(0.8) if answers_say else cached is None


def test_an_engine_that_really_hits_nothing_is_0(attempt):
    attempt.counter("vllm:prompt_tokens", 100_000)
    attempt.counter("vllm:prompt_tokens_by_source", 0, source="local_cache_hit")
    attempt.counter("vllm:prompt_tokens_by_source", 100_000, source="local_compute")
    attempt.records = [attempt.record(at=i, seconds=1, usage_prompt_cache_read_tokens=0) for i in range(100)]
    assert values(attempt)["prompt_share_device"].value == 0.0


def test_the_engine_log_splits_what_the_answers_cannot(attempt):
    start = 1_796_000_000
    lines = [f"log clock starts at {start}.000"]
    for i in range(100):
        stamp = f"{i // 60}.{i % 60:02d}.010.000 I "
        lines.append(f"{stamp}srv  get_availabl: updating prompt cache")
        if i % 4 == 0:
            lines.append(f"{stamp}srv load:  - found better prompt with f_keep = 0.99, f_sim = 0.9")
        lines.append(f"{stamp}slot launch_slot_: id  0 | task {i} | processing task, is_child = 0")
        lines.append(f"{stamp}slot   operator(): id  0 | task {i} | new prompt, n_ctx_slot = 1, task.n_tokens = 1000")
        lines.append(f"{stamp}slot   operator(): id  0 | task {i} | cached n_tokens = 800, memory_seq_rm [800, end)")
    (attempt.folder / "engine.log").write_text("\n".join(lines))
    metrics = measure(attempt.write(), Context(arm="llamacpp-ram"))
    assert metrics.status == "ok"
    shares = [metrics.values[f"prompt_share_{tier}"].value for tier in ("device", "host", "computed")]
    assert shares == pytest.approx([0.6, 0.2, 0.2])


# --------------------------------------------------------------------------------------------- flat tables
def point(name, **change):
    accounting = Accounting(
        records_total=1, warmup=0, warmup_failed=0, succeeded=1, failed=0, cancelled=0, unreadable=0
    )
    data = {"schema_version": 1, "point": name, "status": "ok", "findings": (), "accounting": accounting}
    return PointMetrics(**(data | {"definition_version": 1, "values": {}} | change))


def test_the_flat_table_has_a_row_a_point_and_a_column_a_metric(attempt, tmp_path):
    first = measure(attempt.write(), Context(point="a"))
    bad = point("b", status="invalid", findings=(Finding(code=Reason.WINDOW_SHORT, detail="x"),))
    frame = table([first, bad])
    assert list(frame["point"]) == ["a", "b"]
    assert list(frame["reasons"]) == ["", "window_short"]
    assert set(DEFINITIONS) <= set(frame.columns)
    assert frame["ttft_p50_s"].iloc[0] == pytest.approx(0.1)
    assert np.isnan(frame["ttft_p50_s"].iloc[1])
    frame.to_parquet(tmp_path / "m.parquet")


def test_an_empty_table_still_has_its_columns():
    assert "ttft_p50_s" in table([]).columns


def requests_of(attempt):
    write_requests(read_evidence(attempt.write(), Context()), attempt.folder / "requests.parquet")
    return pd.read_parquet(attempt.folder / "requests.parquet")


def test_requests_are_written_in_parts_that_read_as_one_table(attempt, monkeypatch):
    attempt.records.append(attempt.record(at=200, seconds=1, root_correlation_id="the last"))
    whole = requests_of(attempt)
    monkeypatch.setattr(measured, "PART_ROWS", 7)
    pd.testing.assert_frame_equal(requests_of(attempt), whole)
    assert pq.ParquetFile(attempt.folder / "requests.parquet").num_row_groups == 15
    assert whole["session"].iloc[-1] == "the last"


def test_requests_of_a_point(attempt):
    frame = requests_of(attempt)
    assert len(frame) == 100
    assert frame["start_s"].tolist() == pytest.approx(list(range(100)))
    assert frame["session"].nunique() == 4
    assert list(frame.columns) == [
        *("session", "conversation", "turn", "agent_depth", "start_s", "ttft_s", "e2e_s", "itl_s"),
        *("input_tokens", "output_tokens", "cached_tokens"),
    ]


# -------------------------------------------------------------------------------------------- properties
@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=300))
def test_percentiles_are_ordered_and_inside_the_data(data):
    found = {name: one.value for name, one in _statistics(np.array(data), MINIMUM_SAMPLES).items()}
    known = [found[name] for name in ("p50", "p90", "p95", "p99") if found[name] is not None]
    assert known == sorted(known)
    assert all(min(data) <= value <= max(data) for value in known)
    ordered = sorted(data)
    at = (len(data) - 1) * 0.5
    below, above = ordered[int(at)], ordered[min(int(at) + 1, len(data) - 1)]
    assert found["p50"] == pytest.approx(below + (above - below) * (at - int(at)))


# ----------------------------------------------------------------------------------------- real artefacts
@pytest.mark.parametrize(
    ("name", "share"),
    [("none", 0.104), ("vllm-simple", 0.850), ("vllm-native", 0.850), ("lmcache-mp", 0.620), ("lmcache-v1", 0.844)],
)
def test_h200_prompt_tokens_by_source_is_what_the_answers_say(artefacts, name, share):
    metrics = measure(artefacts("h200-vllm-0.25.1") / name, Context(arm=name))
    assert metrics.status == "ok", metrics.findings
    assert metrics.values["cached_share"].value == pytest.approx(share, abs=0.002)
    total = sum(metrics.values[f"prompt_share_{tier}"].value for tier in ("device", "host", "computed"))
    assert total == pytest.approx(1, abs=0.01)
    attempts = metrics.values["prefix_hit_share_of_attempts"]
    assert attempts.denominator > 10 * metrics.values["cached_share"].denominator


def test_h200_copy_rates(artefacts):
    native = measure(artefacts("h200-vllm-0.25.1") / "vllm-native", Context())
    assert native.values["copy_rate_to_device_gb_per_s"].value == pytest.approx(41.0, abs=0.5)
    mooncake = measure(artefacts("h200-vllm-0.25.1") / "mooncake", Context())
    assert mooncake.values["copy_rate_to_device_gb_per_s"].value == pytest.approx(1.76, abs=0.01)
    assert mooncake.values["host_kv_use_max_share"].value == pytest.approx(41_295_020_032 / 68_719_476_736)
    assert any("1.76 GB/s" in note for note in mooncake.notes)
    assert [finding.code for finding in mooncake.findings] == [Reason.ERROR_SHARE]
    assert mooncake.error_categories == {"deadline": 16}


def test_vllm_cpu_pair_says_that_offload_served_tokens_and_slowed_the_first_one(artefacts):
    folder = artefacts("vllm-cpu-pair")
    none, lmcache = (measure(folder / f"vllm-cpu-{arm}-agentx", Context(arm=arm)) for arm in ("none", "lmcache"))
    assert none.status == lmcache.status == "ok"
    assert none.values["cached_share"].value == pytest.approx(0.5575, abs=0.001)
    assert lmcache.values["cached_share"].value == pytest.approx(0.9153, abs=0.001)
    assert lmcache.values["prompt_share_host"].numerator == 63_104
    assert lmcache.values["ttft_p50_s"].value > none.values["ttft_p50_s"].value


@pytest.mark.parametrize(
    ("archive", "name", "arm", "codes"),
    [
        ("replays", "llamacpp-none", "none", {Reason.ERROR_SHARE}),
        ("replays", "llamacpp-ram512", "llamacpp-ram", {Reason.OFFLOAD_NOT_PROVEN, Reason.ABOVE_CEILING}),
        ("replays", "vllm-cpu-lmcache", "lmcache", {Reason.OFFLOAD_NOT_PROVEN, Reason.ABOVE_CEILING}),
        ("replays", "replay-aborted-in-warmup", "none", {Reason.NO_REQUESTS, Reason.CLIENT_INCOMPLETE}),
        ("replays", "replay-refused", "none", {Reason.NO_REQUESTS, Reason.CLIENT_INCOMPLETE, Reason.ERROR_SHARE}),
        ("replays", "replay-streams-cut", "none", {Reason.NO_REQUESTS, Reason.CLIENT_INCOMPLETE, Reason.ERROR_SHARE}),
        ("h200-agentx-pair", "none", "none", {Reason.CLIENT_CANCELLED, Reason.CLIENT_INCOMPLETE}),
        ("h200-agentx-pair", "vllm-native", "vllm-native", set()),
    ],
)
def test_verdicts_of_real_replays(artefacts, archive, name, arm, codes):
    metrics = measure(artefacts(archive) / name, Context(arm=arm))
    assert {finding.code for finding in metrics.findings} == codes


def test_a_replay_without_records_is_an_input_error(artefacts):
    with pytest.raises(InputError, match="no client records"):
        measure(artefacts("replays") / "replay-all-500", Context())


# ------------------------------------------------------------------------------------------ command line
def test_the_command_prints_strict_json(attempt, capsys):
    attempt.records[3]["metrics"]["inter_token_latency"]["value"] = float("nan")
    assert main([str(attempt.write()), "--arm", "none", "--gpus", "2"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["status"] == "ok"
    assert found["values"]["output_tok_per_s_per_gpu"]["denominator"] == 200.0


def test_the_command_takes_inferencex_error_limit(attempt, capsys):
    attempt.records += [attempt.record(at=5, seconds=1, error={"code": 500}) for _ in range(5)]
    folder = str(attempt.write())
    statuses = []
    for arguments in ([folder], [folder, "--error-share", "0.10"]):
        main(arguments)
        statuses.append(json.loads(capsys.readouterr().out)["status"])
    assert statuses == ["invalid", "ok"]


def test_a_folder_with_two_attempts_is_refused(attempt, tmp_path, capsys):
    attempt.write()
    for name in ("one", "two"):
        shutil.copytree(attempt.client, tmp_path / "both" / name)
    assert main([str(tmp_path / "both")]) == 2
    assert "found the records of 2 attempts: one, two" in capsys.readouterr().err


def test_agentx_harness_full_response_latencies(attempt):
    for record in attempt.records:
        record["metrics"]["full_response_inter_token_latency"] = {"value": 25.0, "unit": "ms"}
    found = values(attempt)
    assert found["full_response_itl_p50_s"].value == pytest.approx(0.025)
    assert found["full_response_interactivity_p90_tok_per_s"].value == pytest.approx(40)


def test_one_token_answers_have_no_inter_token_latency(attempt):
    for record in attempt.records[:60]:
        record["metrics"]["output_sequence_length"]["value"] = 1
    found = values(attempt)
    assert found["itl_p50_s"].samples == found["tpot_p50_s"].samples == 40
    assert found["ttft_p50_s"].samples == 100


def test_inferencex_downloads_are_read_as_they_come(attempt, tmp_path):
    attempt.write()
    download = tmp_path / "results"
    shutil.copytree(attempt.client, download / "aiperf_artifacts")
    assert measure(download, Context()).accounting.succeeded == 100


# A session on an H200 with LMCache MP 0.5.2, and with vLLM's own offload: (prompt tokens, cached tokens) of its turns.
LOST = ((37971, 37632), (38986, 37632), (39754, 37632), (40036, 37632), (40336, 37632), (40832, 37632), (41307, 37632))
KEPT = ((37973, 37632), (38988, 37904), (39756, 38928), (40038, 39712), (40338, 39968), (40834, 40304), (41309, 40768))


def replayed(attempt, **conversations):
    turns = max(len(one) for one in conversations.values())
    attempt.records = [
        attempt.record(
            at=turn * len(conversations) + lane,
            seconds=0.5,
            conversation_id=name,
            source_trace_id=name,
            root_correlation_id=name,
            turn_index=turn,
            input_sequence_length=turn_tokens[turn][0],
            usage_prompt_cache_read_tokens=turn_tokens[turn][1],
        )
        for turn in range(turns)
        for lane, (name, turn_tokens) in enumerate(conversations.items())
        if turn < len(turn_tokens)
    ]
    return measure(attempt.write(), Context())


def test_L4508_a_prefix_that_stands_still_while_the_prompt_grows_is_a_lost_store(attempt):
    found = replayed(attempt, lost=LOST, kept=KEPT)
    frozen = found.values["frozen_prefix_share"]
    # The second turn of the lost session is no proof: what lay beyond its prefix is less than two chunks.
    assert (frozen.numerator, frozen.denominator) == (5, 12)
    [note] = [one for one in found.notes if "lost stores" in one]
    assert note.startswith("5 of 12 follow-up turns")


@pytest.mark.parametrize(
    "turns",
    [
        pytest.param([(9000, 8000), (9600, 4000), (10400, 9472)], id="evicted, then stored again"),
        pytest.param([(9000, 0), (9600, 0), (10400, 0)], id="no cache at all"),
        pytest.param([(9000, 8000), (8900, 8000), (8800, 8000)], id="a prompt that gets shorter"),
        pytest.param([(9000, 8000), (9600, None), (10400, 8000)], id="a turn that does not say"),
    ],
)
def test_what_is_no_lost_store(attempt, turns):
    assert replayed(attempt, one=turns).values["frozen_prefix_share"].numerator == 0
