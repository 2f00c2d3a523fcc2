"""A point over time: from the committed example, and from real exports of vLLM on an H200 where they are there."""

from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.archives import unpack
from tests.examples import gallery
from workflow.evidence import Context
from workflow.readers.aliases import QUANTITIES
from workflow.timeline import COLUMNS, QUEUES, _slices, timeline

EDGES = np.array([0, 10, 20, 30], np.int64) * 10**9


def family(kind, *series):
    return {"type": kind, "series": list(series)}


def series(labels, *slices, length=10):
    parts = [{"start_ns": int(start * 1e9), "end_ns": int((start + length) * 1e9), **one} for start, one in slices]
    return {"endpoint_url": "http://one/metrics", "labels": labels, "timeslices": parts}


def test_counters_are_summed_over_engines_and_what_was_not_scraped_is_not_zero():
    families = {
        "vllm:num_preemptions_total": family(
            "counter",
            series({"engine": "0"}, (0, {"total": 2.0}), (20, {"total": 1.0})),
            series({"engine": "1"}, (0, {"total": 3.0})),
        )
    }
    found = _slices(families, QUANTITIES["preemptions"], EDGES)
    assert found[0] == 5.0
    assert np.isnan(found[1])
    assert found[2] == 1.0


def test_a_gauge_is_the_fullest_engine_and_the_newest_name_wins():
    families = {
        "vllm:gpu_cache_usage_perc": family("gauge", series({}, (0, {"max": 0.9}))),
        "vllm:kv_cache_usage_perc": family(
            "gauge", series({"engine": "0"}, (0, {"max": 0.2})), series({"engine": "1"}, (0, {"max": 0.4}))
        ),
    }
    assert _slices(families, QUANTITIES["device_use"], EDGES)[0] == 0.4


def test_slices_finer_than_ours_are_joined():
    fine = series({}, (0, {"total": 1.0}), (5, {"total": 2.0}), (10, {"total": 4.0}), length=5)
    found = _slices({"vllm:num_preemptions_total": family("counter", fine)}, QUANTITIES["preemptions"], EDGES)
    assert found[:2].tolist() == [3.0, 4.0]


def preemptions(*listed):
    return _slices({"vllm:num_preemptions_total": family("counter", *listed)}, QUANTITIES["preemptions"], EDGES)


def test_G20_servers_that_are_scraped_at_other_moments_are_brought_to_one_grid_before_they_are_added():
    steady = series({"engine": "0"}, *((start, {"total": 10.0}) for start in (0, 10, 20)))
    # One request a second as well, but scraped 4 s later, or only once in 30 s.
    later = series({"engine": "1"}, *((start, {"total": 10.0}) for start in (-6, 4, 14, 24)))
    seldom = series({"engine": "2"}, (0, {"total": 30.0}), length=30)
    assert preemptions(steady, later).tolist() == pytest.approx([20, 20, 20])
    assert preemptions(steady, seldom).tolist() == pytest.approx([20, 20, 20])


def test_G20_a_sum_that_lacks_a_server_in_between_is_unknown_and_no_fall():
    whole = series({"engine": "0"}, *((start, {"total": 10.0}) for start in (0, 10, 20)))
    holed = series({"engine": "1"}, (0, {"total": 10.0}), (20, {"total": 10.0}))
    found = preemptions(whole, holed)
    assert [found[0], found[2]] == [20, 20]
    assert np.isnan(found[1])


def test_G20_a_gauge_that_is_seldom_scraped_holds_until_the_next_scrape():
    families = {
        "vllm:num_requests_waiting": family(
            "gauge",
            series({"engine": "0"}, (0, {"max": 1.0}), (10, {"max": 2.0}), (20, {"max": 3.0})),
            series({"engine": "1"}, (0, {"max": 4.0}), length=30),
            series({"engine": "2"}, (-3, {"max": 0.0}), (7, {"max": 8.0}), (17, {"max": 0.0})),
        )
    }
    assert _slices(families, QUEUES["waiting"], EDGES).tolist() == [5.0, 14.0, 7.0]


steps = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 50)), min_size=1, max_size=12)


@given(st.lists(st.tuples(st.integers(0, 9), steps), min_size=1, max_size=4))
def test_G20_no_increase_is_lost_or_made_by_the_grid(servers):
    listed, total = [], 0
    for i, (start, parts) in enumerate(servers):
        ends = np.cumsum([start, *(length for length, _ in parts)])
        slices = [
            {"start_ns": int(a) * 10**9, "end_ns": int(b) * 10**9, "total": float(value)}
            for (a, b), (_, value) in zip(pairwise(ends), parts, strict=True)
        ]
        total += sum(value for _, value in parts)
        listed.append({"endpoint_url": "http://one/metrics", "labels": {"engine": str(i)}, "timeslices": slices})
    edges = np.arange(0, 130, 10, dtype=np.int64) * 10**9
    families = {"vllm:num_preemptions_total": family("counter", *listed)}
    assert np.nansum(_slices(families, QUANTITIES["preemptions"], edges)) == pytest.approx(total)


def test_P7_a_cut_off_export_leaves_what_the_records_say(attempt):
    attempt.counter("vllm:num_preemptions", 3.0)
    attempt.write()
    export = attempt.client / "server_metrics_export.json"
    export.write_text(export.read_text()[:-40])
    frame = timeline(attempt.folder, Context())
    assert frame["preemptions_per_s"].isna().all()
    assert frame["output_tok_per_s"].max() > 0


def test_the_committed_timelines_have_all_columns_and_add_up_to_the_throughput():
    points, table, _, timelines = gallery.real()
    assert timelines
    for point in points:
        if point.id not in timelines:
            continue
        frame = timelines[point.id]
        assert set(COLUMNS) <= set(frame.columns)
        window = frame[frame["phase"] == "profiling"]
        row = table[table["point"] == point.id].iloc[0]
        made = (window["output_tok_per_s"] * window["length_s"]).sum() / row["window_s"]
        assert made == pytest.approx(row["output_tok_per_s_per_gpu"], rel=0.02)
        load = (window["in_flight"] * window["length_s"]).sum() / row["window_s"]
        assert load == pytest.approx(row["achieved_concurrency_mean"], rel=0.02)


def test_a_real_export_of_vllm_on_a_gpu(shared, tmp_path):
    archive = shared / "artefacts" / "h200-agentx-pair.tar.xz"
    unpack(archive, tmp_path, lambda name: "vllm-native" in name.split("/")[:2])
    folder = next(tmp_path.rglob("server_metrics_export.json")).parent
    frame = timeline(folder, Context(duration_s=70.0))
    assert frame["device_use_share"].max() == pytest.approx(0.99, abs=0.05)
    assert frame["to_device_gb_per_s"].max() > 5
    assert frame["waiting"].max() >= 5
    assert set(frame["phase"]) == {"profiling", "drain"}
    assert frame["host_use_share"].isna().all()
    assert isinstance(frame, pd.DataFrame)
