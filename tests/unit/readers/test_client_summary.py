import json

import pytest

from workflow.contract import InputError
from workflow.readers.client_summary import ClientSummary, read_client_csv, read_client_summary, start_ns


@pytest.mark.parametrize("version", ["1.3", "2.0", None])
def test_unknown_versions_are_refused_by_name(tmp_path, version):
    path = tmp_path / "profile_export_aiperf.json"
    path.write_text(json.dumps({"schema_version": version}))
    with pytest.raises(InputError, match=f"found version {version!r} of the replay client's summary.*allowed: 1.4"):
        read_client_summary(path)


def test_P2_thousands_separators_in_the_csv(tmp_path):
    path = tmp_path / "s.csv"
    path.write_text(
        'Metric,avg,min,p99\nRequest Latency (ms),"15,559.05",3.00,"20,000"\n\n'
        'Metric,Value\nBenchmark Duration (sec),"1,800.5"\n'
    )
    summary = read_client_csv(path)
    assert summary.statistic("request_latency") == 15559.05
    assert summary.statistic("request_latency", "p99") == 20000
    assert summary.metrics["request_latency"]["unit"] == "ms"
    assert summary.statistic("benchmark_duration") == 1800.5


def test_the_real_csv_says_what_the_json_says(artefacts):
    folder = artefacts("replays") / "llamacpp-ram512"
    csv, js = (
        read_client_csv(folder / "profile_export_aiperf.csv"),
        read_client_summary(folder / "profile_export_aiperf.json"),
    )
    assert csv.statistic("request_latency", "p90") == pytest.approx(js.statistic("request_latency", "p90"), abs=0.005)
    assert csv.statistic("time_to_first_token") == pytest.approx(143.82, abs=0.005)


@pytest.mark.parametrize(
    ("metric", "share"),
    [
        ({"unit": "%", "avg": 88.0, "sum": 90, "count": 100}, 0.9),
        ({"unit": "%", "avg": 88.0}, 0.88),
        ({"unit": "ratio", "avg": 0.88}, 0.88),
        ({"unit": "%", "avg": float("nan")}, None),
    ],
)
def test_percent_is_not_fraction(metric, share):
    found = ClientSummary(metrics={"x": metric}).share("x")
    assert (found and found[0]) == (share and pytest.approx(share))


@pytest.mark.parametrize("hours", [0, 2, -5.75, 13])
def test_a_start_without_a_zone_is_taken_near_the_first_request(tmp_path, hours):
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"schema_version": "1.4", "start_time": "2026-12-01T12:00:00.5"}))
    utc = 1_796_126_400.5 - hours * 3600
    assert start_ns(read_client_summary(path), round((utc + 3) * 1e9)) == round(utc * 1e9)


def test_agentx_harness_writes_the_same_file_with_more_metrics(tmp_path):
    path = tmp_path / "profile_export_aiperf.json"
    path.write_text(
        json.dumps(
            {
                "schema_version": "1.4",
                "aiperf_version": "1.0.12",
                "full_response_inter_token_latency": {"unit": "ms", "avg": 9.0},
                "metadata": {"scenario": "agentx", "submission_invalid_reasons": ["window_short"]},
            }
        )
    )
    found = read_client_summary(path)
    assert (found.client_version, found.submission_invalid_reasons) == ("1.0.12", ("window_short",))
