"""A point over time: from the committed example, and from real exports of vLLM on an H200 where they are there."""

import tarfile

import numpy as np
import pandas as pd
import pytest

from tests.examples import gallery
from workflow.evidence import Context
from workflow.readers.aliases import QUANTITIES
from workflow.timeline import COLUMNS, _slices, timeline

EDGES = np.array([0, 10, 20, 30], np.int64) * 10**9


def family(kind, *series):
    return {"type": kind, "series": list(series)}


def series(labels, *slices):
    parts = [{"start_ns": int(start * 1e9), "end_ns": int((start + 10) * 1e9), **value} for start, value in slices]
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
    fine = series({}, (0, {"total": 1.0}), (4, {"total": 2.0}), (12, {"total": 4.0}))
    found = _slices({"vllm:num_preemptions_total": family("counter", fine)}, QUANTITIES["preemptions"], EDGES)
    assert found[:2].tolist() == [3.0, 4.0]


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
    with tarfile.open(shared / "artefacts" / "h200-agentx-pair.tar.xz") as archive:
        members = [one for one in archive.getmembers() if one.name.split("/")[1:2] == ["vllm-native"] or
                   one.name.startswith("vllm-native/")]  # fmt: skip
        archive.extractall(tmp_path, members=members, filter="data")
    folder = next(tmp_path.rglob("server_metrics_export.json")).parent
    frame = timeline(folder, Context(duration_s=70.0))
    assert frame["device_use_share"].max() == pytest.approx(0.99, abs=0.05)
    assert frame["to_device_gb_per_s"].max() > 5
    assert frame["waiting"].max() >= 5
    assert set(frame["phase"]) == {"profiling", "drain"}
    assert frame["host_use_share"].isna().all()
    assert isinstance(frame, pd.DataFrame)
