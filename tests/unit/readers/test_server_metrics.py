import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workflow.contract import DamagedFile, InputError
from workflow.readers import server_metrics
from workflow.readers.aliases import find
from workflow.readers.server_metrics import read_families, read_server_metrics


def export(tmp_path, metrics, **change):
    path = tmp_path / "server_metrics_export.json"
    path.write_text(json.dumps({"schema_version": "1.1", "metrics": metrics, **change}))
    return path


def family(kind, stats, slices=None, **labels):
    series = {"endpoint_url": "http://a", "labels": labels, "stats": stats}
    if slices is not None:
        series["timeslices"] = slices
    return {"type": kind, "series": [series]}


@pytest.mark.parametrize("version", ["0.9", "2.0", None])
def test_unknown_versions_are_refused_by_name(tmp_path, version):
    with pytest.raises(InputError, match=f"found version {version!r} of the server metrics.*allowed: 1.0, 1.1"):
        read_server_metrics(export(tmp_path, {}, schema_version=version))


def test_counters_are_increases_and_total_is_no_part_of_the_name(tmp_path):
    scrape = read_server_metrics(export(tmp_path, {"vllm:prompt_tokens_total": family("counter", {"total": 7.0})}))
    assert find(scrape.series, "prompt_tokens").value == 7.0


def test_histograms_become_their_sum_and_count(tmp_path):
    stats = {"sum": 3.5, "count": 2, "buckets": {"1": 0, "+Inf": 2}}
    scrape = read_server_metrics(export(tmp_path, {"lmcache:time_to_retrieve": family("histogram", stats)}))
    assert find(scrape.series, "time_to_device").value == 3.5
    assert not any(one.reset for one in scrape.series)


def test_G13_null_buckets_are_a_reset(tmp_path):
    stats = {"sum": 3.5, "count": 2, "buckets": None}
    scrape = read_server_metrics(export(tmp_path, {"lmcache:time_to_retrieve": family("histogram", stats)}))
    assert find(scrape.series, "time_to_device").reset


@pytest.mark.parametrize(("totals", "reset"), [([5, 0, 2], False), ([5, -4, 2], True)])
def test_G13_a_counter_that_goes_back_in_one_slice(tmp_path, totals, reset):
    slices = [{"start_ns": i, "end_ns": i + 1, "total": total, "rate": total} for i, total in enumerate(totals)]
    scrape = read_server_metrics(export(tmp_path, {"vllm:prompt_tokens": family("counter", {"total": 3}, slices)}))
    assert find(scrape.series, "prompt_tokens").reset is reset


def test_G14_a_counter_that_was_exported_without_type(tmp_path):
    stats = {"min": 1000.0, "max": 1600.0, "avg": 1300.0}
    scrape = read_server_metrics(export(tmp_path, {"vllm:prompt_tokens": family("unknown", stats)}))
    assert find(scrape.series, "prompt_tokens").value == 600


def test_a_series_whose_slices_are_null_is_one_without_slices(tmp_path):
    one = family("counter", {"total": 7.0})
    one["series"][0]["timeslices"] = None
    path = export(tmp_path, {"vllm:prompt_tokens": one})
    assert find(read_server_metrics(path).series, "prompt_tokens").value == 7.0


def test_G7_nan_text_is_null(tmp_path):
    path = export(tmp_path, {"vllm:num_preemptions": family("counter", {"total": float("nan")})})
    assert "NaN" in path.read_text()
    assert find(read_server_metrics(path).series, "preemptions") is None


def test_a_cut_off_export_is_an_input_error(tmp_path):
    path = export(tmp_path, {"vllm:prompt_tokens": family("counter", {"total": 3}, [{"total": 3}])})
    path.write_text(path.read_text()[:-40])
    with pytest.raises(InputError, match="not JSON"):
        read_server_metrics(path)


labels = st.text(st.characters(codec="utf-8"), max_size=12) | st.just('"timeslices": [') | st.just("]")
numbers = st.dictionaries(st.sampled_from(["total", "rate", "avg"]), st.floats(0, 1e9) | st.just(math.nan), max_size=3)
buckets = st.fixed_dictionaries({"buckets": st.dictionaries(st.sampled_from(["0.1", "+Inf"]), st.integers(0, 9))})
slices = st.lists(numbers | buckets, max_size=4)


@given(st.lists(st.tuples(labels, slices), min_size=1, max_size=4), st.integers(80, 300), st.sampled_from([None, 2]))
def test_slices_stay_in_the_file_and_nothing_else_changes(tmp_path_factory, rows, block, indent):
    series = [{"labels": {"x": label}, "timeslices": parts, "stats": {"total": 1}} for label, parts in rows]
    path = tmp_path_factory.mktemp("export") / "server_metrics_export.json"
    data = {"schema_version": "1.1", "metrics": {"a": {"series": series}}}
    path.write_text(json.dumps(data, indent=indent))
    whole, server_metrics.BLOCK_BYTES = server_metrics.BLOCK_BYTES, block
    try:
        found = read_families(path)["a"]["series"]
        listed = [list(one.pop("timeslices")) for one in found]
    finally:
        server_metrics.BLOCK_BYTES = whole
    assert found == [{"labels": {"x": label}, "stats": {"total": 1}} for label, _ in rows]
    assert listed == json.loads(json.dumps([parts for _, parts in rows]), parse_constant=lambda _: None)


def test_slices_that_are_cut_off_in_the_middle_are_a_damaged_file(tmp_path):
    path = export(tmp_path, {"vllm:prompt_tokens": family("counter", {"total": 3}, [{"total": 3}])})
    path.write_text(path.read_text().replace('{"total": 3}]', '{"total": }]'))
    (series,) = read_families(path)["vllm:prompt_tokens"]["series"]
    with pytest.raises(DamagedFile, match="time slices that are not JSON"):
        list(series["timeslices"])
