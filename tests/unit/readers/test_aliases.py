import pytest
from hypothesis import given
from hypothesis import strategies as st

from workflow.metrics import Context, measure
from workflow.readers.aliases import QUANTITIES, find
from workflow.readers.prometheus_text import changes, read_pair, read_snapshot
from workflow.readers.series import Series, without_double_scrapes


def counter(name, delta, endpoint="a", reset=False, **labels):
    return Series(name, "counter", endpoint, labels, delta=delta, reset=reset)


def snapshot(path, text):
    path.write_text(text)
    return path


V17 = """
# TYPE vllm:gpu_prefix_cache_queries_total counter
vllm:gpu_prefix_cache_queries_total{engine="0"} 40
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0"} 640
# TYPE vllm:prefix_cache_queries_created gauge
vllm:prefix_cache_queries_created{engine="0"} 1.75e9
"""


def test_V17_newest_name_wins_and_created_is_ignored(tmp_path):
    scrape = read_pair(None, snapshot(tmp_path / "a.prom", V17), "a")
    found = find(scrape.series, "prefix_queries")
    assert (found.value, found.name) == (640, "vllm:prefix_cache_queries")
    assert not any("created" in one.name for one in scrape.series)


def test_each_endpoint_has_its_own_newest_name():
    series = [counter("vllm:kv_offload_load_bytes", 5, "new")]
    series += [counter("vllm:kv_offload_total_bytes", 7, "new", transfer_type="CPU_to_GPU")]
    series += [counter("vllm:kv_offload_total_bytes", 11, "old", transfer_type="CPU_to_GPU")]
    series += [counter("vllm:kv_offload_total_bytes", 99, "old", transfer_type="GPU_to_CPU")]
    assert find(series, "bytes_to_device").value == 16


def test_an_engine_and_its_store_are_not_added_up():
    series = [counter("vllm:kv_offload_load_bytes", 5), counter("mem_cache_hit_bytes", 5, "master")]
    assert find(series, "bytes_to_device").component == "vllm"


def test_ranks_are_added_up():
    series = [counter("vllm:num_preemptions", i, engine=str(i)) for i in range(4)]
    assert find(series, "preemptions").value == 6


def test_M13_sglang_tells_device_host_and_storage_apart():
    series = [
        counter("sglang:cached_tokens", n, cache_source=s) for s, n in (("device", 6), ("host", 3), ("storage_file", 1))
    ]
    assert [find(series, f"tokens_from_{tier}").value for tier in ("device", "host", "storage")] == [6, 3, 1]
    assert find(series, "tokens_cached").value == 10


L8 = """
# TYPE lmcache_mp_lookup_requested_tokens_total counter
lmcache_mp_lookup_requested_tokens_total{model_name="m"} 8000
# TYPE lmcache_mp_lookup_hit_tokens_total counter
lmcache_mp_lookup_hit_tokens_total{model_name="m"} 6000
"""
L8_NEWER = """
# TYPE lmcache_mp_lookups_requests_total counter
lmcache_mp_lookups_requests_total{model_name="m"} 40
# TYPE lmcache_mp_lookup_early_exit_requests_total counter
lmcache_mp_lookup_early_exit_requests_total{model_name="m",reason="no_gpu_context"} 9
lmcache_mp_lookup_early_exit_requests_total{model_name="m",reason="empty_chunk_hashes"} 1
"""


@pytest.mark.parametrize(("text", "early"), [(L8, None), (L8 + L8_NEWER, 0.25)], ids=["older", "newer"])
def test_L8_lookups_that_ended_early_stand_beside_the_hit_share_that_does_not_hold_them(attempt, text, early):
    snapshots = attempt.write() / "metrics"
    snapshots.mkdir()
    (snapshots / "8090.after.prom").write_text(text)
    found = measure(attempt.folder, Context()).values
    assert found["store_hit_share_of_lookups"].value == 0.75
    assert found["store_early_exit_share"].value == early
    assert found["store_early_exit_share"].numerator == (None if early is None else 10)


# As vLLM 0.25.1 exported it.
MOONCAKE_LOOKUPS = """
# TYPE vllm:mooncake_store_operation_total counter
vllm:mooncake_store_operation_total{engine="0",model_name="m",operation="lookup_exists",status="ok"} 1914.0
vllm:mooncake_store_operation_total{engine="0",model_name="m",operation="load_get",status="ok"} 35.0
# TYPE vllm:mooncake_store_operation_time_seconds histogram
vllm:mooncake_store_operation_time_seconds_bucket{engine="0",le="+Inf",operation="lookup_exists",status="ok"} 1914.0
vllm:mooncake_store_operation_time_seconds_count{engine="0",operation="lookup_exists",status="ok"} 1914.0
vllm:mooncake_store_operation_time_seconds_sum{engine="0",model_name="m",operation="lookup_exists",status="ok"} 7.33
"""


def test_lookups_of_a_store_are_counted_and_timed(attempt):
    snapshots = attempt.write() / "metrics"
    snapshots.mkdir()
    (snapshots / "engine.after.prom").write_text(MOONCAKE_LOOKUPS)
    found = measure(attempt.folder, Context()).values
    assert (found["store_lookups"].value, found["store_lookup_s"].value) == (1914, pytest.approx(7.33))
    assert found["store_early_exit_share"].value is None, "nothing counts those"


L7 = """
# TYPE lmcache:lookup_hit_rate gauge
lmcache:lookup_hit_rate{role="worker"} 1.0
# TYPE lmcache:num_lookup_tokens_total counter
lmcache:num_lookup_tokens_total{role="worker"} 1000
# TYPE lmcache:num_lookup_hits_total counter
lmcache:num_lookup_hits_total{role="worker"} 250
"""


def test_L7_lmcache_counts_are_used_and_its_rate_gauge_is_not(tmp_path):
    series = read_pair(None, snapshot(tmp_path / "a.prom", L7), "a").series
    assert find(series, "store_hit_tokens").value / find(series, "store_lookup_tokens").value == 0.25


def test_L8_the_mp_server_has_names_of_its_own(tmp_path):
    text = "lmcache_mp_lookup_requested_tokens_total 800\nlmcache_mp_lookup_hit_tokens_total 200\n"
    series = read_pair(None, snapshot(tmp_path / "a.prom", text), "a").series
    assert find(series, "store_hit_tokens").component == "lmcache-mp"


def test_G14_a_counter_without_type_is_its_increase(tmp_path):
    before = snapshot(tmp_path / "b.prom", "vllm:prompt_tokens 1000\n")
    after = snapshot(tmp_path / "a.prom", "vllm:prompt_tokens 1600\n")
    assert find(read_pair(before, after, "a").series, "prompt_tokens").value == 600


def test_G13_a_restart_between_two_scrapes_is_seen(tmp_path):
    before = snapshot(tmp_path / "b.prom", "# TYPE vllm:prompt_tokens counter\nvllm:prompt_tokens_total 1000\n")
    after = snapshot(tmp_path / "a.prom", "# TYPE vllm:prompt_tokens counter\nvllm:prompt_tokens_total 300\n")
    found = find(read_pair(before, after, "a").series, "prompt_tokens")
    assert (found.value, found.reset) == (300, True)


def test_a_quantity_that_is_not_there_is_none_and_zero_is_zero():
    assert find([], "preemptions") is None
    assert find([counter("vllm:num_preemptions", None)], "preemptions") is None
    assert find([counter("vllm:num_preemptions", 0.0)], "preemptions").value == 0.0


def test_the_share_pinned_by_transfers_is_not_the_fill():
    names = {alias.name for alias in QUANTITIES["host_use"].aliases}
    assert "vllm:kv_offload_cpu_cache_usage_perc" not in names


@pytest.mark.parametrize("other", ["http://localhost:8000/metrics", "http://0.0.0.0:8000/metrics/"])
def test_G4_one_server_under_two_names_of_the_loopback(other):
    series = (
        counter("vllm:prompt_tokens", 1000, "http://127.0.0.1:8000/metrics"),
        counter("vllm:prompt_tokens", 990, other),
    )
    kept, remarks = without_double_scrapes(series)
    assert find(kept, "prompt_tokens").value == 1000
    assert "counted once" in remarks[0]


def test_G4_one_process_under_two_host_names():
    start = 1_796_000_000.25
    series = tuple(
        one
        for url, tokens in (("http://node1:8000/metrics", 1000), ("http://10.0.0.7:8000/metrics", 1001))
        for one in (
            counter("vllm:prompt_tokens", tokens, url, engine="0"),
            Series("process_start_time_seconds", "gauge", url, {}, high=start),
        )
    )
    assert find(without_double_scrapes(series)[0], "prompt_tokens").value == 1000


def test_two_servers_are_two_servers():
    series = tuple(
        one
        for port, tokens in ((1, 1000), (2, 1000))
        for one in (
            counter("vllm:prompt_tokens", tokens, f"http://a:{port}/metrics", engine="0"),
            Series("process_start_time_seconds", "gauge", f"http://a:{port}/metrics", {}, high=1.79e9 + port),
        )
    )
    assert find(without_double_scrapes(series)[0], "prompt_tokens").value == 2000


steps = st.lists(st.integers(0, 10**9), min_size=1, max_size=5)


@given(st.dictionaries(st.sampled_from("0123"), st.tuples(steps, steps), min_size=1))
def test_the_increase_over_a_window_is_the_sum_of_what_ranks_added(tmp_path_factory, ranks):
    folder = tmp_path_factory.mktemp("pair")
    texts = {"b": "", "a": ""}
    for rank, (old, new) in ranks.items():
        texts["b"] += f'vllm:prompt_tokens_total{{engine="{rank}"}} {sum(old)}\n'
        texts["a"] += f'vllm:prompt_tokens_total{{engine="{rank}"}} {sum(old) + sum(new)}\n'
    pair = read_pair(snapshot(folder / "b", texts["b"]), snapshot(folder / "a", texts["a"]), "x")
    found = find(pair.series, "prompt_tokens")
    assert found.value == sum(sum(new) for _, new in ranks.values())
    assert not found.reset
    backwards = changes(read_snapshot(folder / "a"), read_snapshot(folder / "b"), "x")
    assert any(one.reset for one in backwards) == any(sum(new) for _, new in ranks.values())
