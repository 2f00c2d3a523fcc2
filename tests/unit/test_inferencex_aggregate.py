import json

import pytest

from workflow.evidence import Context, read_evidence
from workflow.inferencex_aggregate import aggregate
from workflow.metrics import main

GOLDEN = [
    ("replays", "llamacpp-none"),
    ("replays", "llamacpp-ram512"),
    ("replays", "replay-aborted-in-warmup"),
    ("replays", "replay-streams-cut"),
    ("replays", "vllm-cpu-lmcache"),
    ("vllm-cpu-pair", "vllm-cpu-none-agentx"),
    ("vllm-cpu-pair", "vllm-cpu-lmcache-agentx"),
    ("h200-agentx-pair", "none"),
    ("h200-agentx-pair", "vllm-native"),
]


@pytest.mark.parametrize(("archive", "name"), GOLDEN)
def test_equal_to_inferencex_own_aggregate(artefacts, capsys, archive, name):
    folder = artefacts(archive) / name
    assert main([str(folder), "--inferencex"]) == 0
    found = json.loads(capsys.readouterr().out)
    wanted = json.loads((folder / "inferencex-aggregate.json").read_text())
    compared = ("request_metrics", "server_metrics", "request_accounting", "kv_cache_pool_tokens", "warnings")
    for key in (*compared, "num_requests_total", "num_requests_successful"):
        assert found.get(key) == wanted.get(key), key


def toy_record(start, end, ttft, latency, itl, isl, osl, phase="profiling", error=None):
    values = (ttft, latency, itl, isl, osl)
    names = (
        *("time_to_first_token", "request_latency", "inter_token_latency"),
        *("input_sequence_length", "output_sequence_length"),
    )
    metadata = {"request_start_ns": start * 10**9, "request_end_ns": end * 10**9, "conversation_id": "t"}
    if phase:
        metadata["benchmark_phase"] = phase
    units = ("ms", "ms", "ms", "tokens", "tokens")
    columns = zip(names, values, units, strict=True)
    metrics = {name: {"value": value, "unit": unit} for name, value, unit in columns}
    return {"metadata": metadata, "metrics": metrics, "error": error}


@pytest.fixture
def toy(tmp_path):
    records = [
        toy_record(0, 1, 100, 1000, 10, 500, 1, "warmup"),
        toy_record(10, 12, 500, 2000, 20, 1000, 76),
        toy_record(11, 15, 1000, 4000, 40, 3000, 76),
        toy_record(12, 14, 250, 2000, 10, 2000, 176, None),
        toy_record(13, 16, 1, 1, 1, 1, 1, error={"type": "ServerError"}),
        toy_record(0, 1, 1, 1, 1, 1, 1, "warmup", {"message": "boom: z"}),
    ]
    (tmp_path / "profile_export.jsonl").write_text("\n".join(map(json.dumps, records)))
    hit = {"unit": "%", "avg": 88, "sum": 90, "count": 100}
    summary = {"schema_version": "1.4", "theoretical_prefix_cache_hit": hit}
    (tmp_path / "profile_export_aiperf.json").write_text(json.dumps(summary))
    (tmp_path / "server.log").write_text(
        "(EngineCore_DP0 pid=1) GPU KV cache size: 1,000 tokens\n"
        "(EngineCore_DP0 pid=1) GPU KV cache size: 1,200 tokens\n"
        "(EngineCore_DP1 pid=2) GPU KV cache size: 800 tokens\nGPU KV cache size: 50 tokens\n"
    )
    return tmp_path


def server(folder, by_source=False):
    def counters(*rows):
        return {
            "type": "counter",
            "series": [{"endpoint_url": "u", "labels": label, "stats": {"total": total}} for label, total in rows],
        }

    engines = ({"engine": "0"}, {"engine": "1"})
    metrics = {
        f"vllm:{name}": counters(*zip(engines, totals, strict=False))
        for name, totals in {
            "prompt_tokens": (4000, 2000),
            "generation_tokens": (200, 128),
            "prefix_cache_hits": (3000, 500),
            "prefix_cache_queries": (4000, 2000),
            "external_prefix_cache_hits": (1000,),
            "external_prefix_cache_queries": (2500,),
        }.items()
    }
    metrics["vllm:kv_offload_total_bytes"] = counters(({"transfer_type": "GPU_to_CPU"}, 1e9))
    metrics["vllm:kv_cache_usage_perc"] = {
        "type": "gauge",
        "series": [{"labels": label, "stats": {"max": use}} for label, use in zip(engines, (0.91, 0.40), strict=True)],
    }
    if by_source:
        rows = {"local_compute": 1500, "local_cache_hit": 3500, "external_kv_transfer": 1000}
        metrics["vllm:prompt_tokens_by_source"] = counters(*[({"source": key}, total) for key, total in rows.items()])
    (folder / "server_metrics_export.json").write_text(json.dumps({"schema_version": "1.1", "metrics": metrics}))


def test_toy_case_of_the_reference(toy):
    server(toy)
    found = aggregate(read_evidence(toy, Context()), gpus=2)
    assert found["request_accounting"] == {
        "records_total": 6,
        "records_profiled": 3,
        "records_dropped_total": 3,
        "records_warmup_dropped": 2,
        "records_error_dropped": 2,
        "error_categories": {"ServerError": 1, "boom": 1},
    }
    latency, throughput = found["request_metrics"]["latency"], found["request_metrics"]["throughput"]
    assert list(latency["ttft"].values()) == [0.58333, 0.5, 0.75, 0.9, 0.95, 0.3118]
    assert [latency["e2el"][key] for key in ("mean", "p50", "p90")] == [2.66667, 2, 3.6]
    assert [latency["itl"][key] for key in ("mean", "p50", "p90", "std")] == [0.02333, 0.02, 0.036, 0.01247]
    assert list(latency["intvty"].values()) == [42.85714, 50, 33.33333, 27.77778, 26.31579, 31.18048]
    normed = [latency["e2e_norm_intvty"][key] for key in ("mean", "p50", "p90", "std")]
    assert normed == [33.21854, 38, 21.11111, 29.10136]
    qps = found["request_metrics"]["qps"]
    assert [qps[key] for key in ("samples", "mean", "p50", "std")] == [3, 0.66667, 1, 0.4714]
    rates = [throughput[key]["tokens_per_second"] for key in ("input", "output", "total")]
    assert [*rates, throughput["duration_seconds"]] == [1200, 65.6, 1265.6, 5]
    assert throughput["per_gpu"]["total_tput_tps"] == 632.8
    assert found["request_metrics"]["cache"]["theoretical_cache_hit_rate"] == 0.9
    assert found["kv_cache_pool_tokens"] == 2000
    assert set(found["server_metrics"]["kv_offload"].values()) == {None}
    cache = found["server_metrics"]["cache"]
    rates = [cache[f"{tier}_cache_hit_rate"] for tier in ("gpu", "external", "overall")]
    assert rates == [0.58333, 0.4, 0.58333]


def test_G3_the_same_traffic_has_other_hit_rates_where_a_newer_metric_is_present(toy):
    server(toy, by_source=True)
    cache = aggregate(read_evidence(toy, Context()), gpus=2)["server_metrics"]["cache"]
    assert [cache[f"{tier}_cache_hit_rate"] for tier in ("gpu", "external", "overall")] == [0.58333, 0.16667, 0.75]


def test_without_server_metrics_totals_come_from_records(toy):
    found = aggregate(read_evidence(toy, Context()), gpus=2)
    assert found["server_metrics"]["tokens"]["prompt_total"] == 6000
    assert found["warnings"] == ["server_metrics_export.json missing or empty"]


def test_a_folder_without_records_is_an_input_error_without_a_traceback(tmp_path, capsys):
    assert main([str(tmp_path), "--inferencex"]) == 2
    assert "no client records; allowed: a folder with profile_export.jsonl" in capsys.readouterr().err
