"""Pairs, refusals, verdicts, fronts: on the committed example and on tables made for one question."""

import json
import re

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import gallery, synthetic
from tests.unit.test_adoption import a_run
from tests.unit.test_intervals import requests as some_requests
from workflow import measured
from workflow.comparison import REFUSED, compare, headline, number, pareto_front, summary, verdict
from workflow.explanation import explain
from workflow.intervals import COMPARED


def sweep(arms, effects=None, repeats=1, sessions=12, **columns):
    """Return (table, requests) of one group at one concurrency; `effects` multiplies the TTFT of an arm."""
    rng, rows, requests = np.random.default_rng(2), [], {}
    shared = np.random.default_rng(9).normal(0, 0.5, sessions)
    for repeat in range(1, repeats + 1):
        for arm in arms:
            point = f"{arm}-{repeat}"
            frame = some_requests(rng, sessions, 8, (effects or {}).get(arm, 1.0), own_spread=0.1, effects=shared)
            requests[point] = frame
            row = dict.fromkeys([one.name for one in COMPARED], 1.0)
            row |= {"ttft_p50_s": frame["ttft_s"].median(), "ttft_p90_s": np.percentile(frame["ttft_s"], 90)}
            row |= {"point": point, "group": "g", "concurrency": 4, "arm": arm, "repeat": repeat, "status": "ok"}
            row |= {"reasons": "", "definition_version": 1, "trace_sha256": "a" * 64, "versions": '{"engine": "1"}'}
            row |= {"budget_gb": 0.0 if arm == "none" else 100.0, "started_unix_s": float(len(rows))}
            row |= {"backend_version": None}
            rows.append(row)
    table = pd.DataFrame(rows)
    for name, by_arm in columns.items():
        for arm, value in by_arm.items():
            table[name] = table[name].astype(object)
            table.loc[table["arm"] == arm, name] = value
    return table, requests


def row_of(pairs, metric="ttft_p50_s", arm="x", against="none"):
    found = pairs[(pairs["metric"] == metric) & (pairs["arm"] == arm) & (pairs["against"] == against)]
    assert len(found) == 1
    return found.iloc[0]


def test_a_win_and_a_loss_are_told_by_the_direction_of_the_metric():
    pairs, _ = compare(*sweep(["none", "x", "y"], {"x": 0.5, "y": 2.0}))
    assert row_of(pairs, arm="x")["verdict"] == "better"
    assert row_of(pairs, arm="y")["verdict"] == "worse"
    assert row_of(pairs, arm="x")["ratio"] == pytest.approx(0.5, rel=0.1)
    assert row_of(pairs, arm="y", against="x")["ratio"] == pytest.approx(4.0, rel=0.1)
    assert "noise between runs not known" in row_of(pairs, arm="x")["why"]


def test_X29_without_a_control_arms_are_compared_among_themselves_and_with_no_baseline():
    pairs, _ = compare(*sweep(["x", "y"]))
    alone = pairs[pairs["against"] == "none"]
    assert set(alone["verdict"]) == {"no baseline"}
    assert len(alone) == 2 * len(COMPARED)
    assert row_of(pairs, arm="y", against="x")["verdict"] == "no difference"


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("definition_version", 2, "two metric definitions must not share an axis: 1, 2"),
        ("trace_sha256", "b" * 64, "two contents of the trace set must not share an axis: aaaaaaaaaaaa, bbbbbbbbbbbb"),
        ("versions", '{"engine": "2", "store": "7"}', "two builds of engine: 1, 2"),
    ],
    ids=["X17 definitions", "X26 data sets", "builds"],
)
def test_X17_X26_what_must_not_share_an_axis_is_not_compared(column, value, says):
    pairs, _ = compare(*sweep(["none", "x"], **{column: {"x": value}}))
    assert set(pairs["verdict"]) == {"not comparable"}
    assert set(pairs["why"]) == {says}
    assert pairs["ratio"].isna().all()


@pytest.mark.parametrize(("column", "value"), [("trace_sha256", "b" * 64), ("versions", '{"image": "b2"}')])
def test_repeats_over_other_sessions_or_with_another_build_have_no_mean_and_no_noise(column, value):
    table, requests = sweep(
        ["none", "x", "y"], repeats=2, versions=dict.fromkeys(("none", "x", "y"), '{"image": "a1"}')
    )
    table.loc[table["point"] == "x-2", [column, "total_tok_per_s_per_gpu"]] = value, 1e6
    pairs, arms = compare(table, requests)
    assert set(pairs.loc[pairs["arm"] == "x", "verdict"]) == {"not comparable"}
    assert set(arms["arm"]) == {"none", "y"}
    assert row_of(pairs, "total_tok_per_s_per_gpu", arm="y")["noise_high"] < 10


def test_a_moved_tag_is_another_build():
    digests = [measured._seen(a_run().model_copy(update={"image_digest": one}))["versions"] for one in ("a1", "b2")]
    pairs, _ = compare(*sweep(["none", "x"], versions=dict(zip(("none", "x"), digests, strict=True))))
    assert set(pairs["why"]) == {"two builds of image: a1, b2"}


def test_two_versions_of_a_backend_that_are_asked_for_are_compared_and_no_other_two_builds():
    seen = {"none": '{"engine": "1"}', "x": '{"engine": "1", "store": "7"}', "y": '{"engine": "1", "store": "8"}'}
    asked = {"x": "7", "y": "8"}
    for built in ("8", "8+cpu"):
        versions = seen | {"y": f'{{"engine": "1", "store": "{built}"}}'}
        pairs, _ = compare(*sweep(["none", "x", "y"], {"y": 0.5}, versions=versions, backend_version=asked))
        assert row_of(pairs, arm="y", against="x")["verdict"] == "better"
    pairs, _ = compare(*sweep(["none", "x", "y"], versions=seen))
    assert row_of(pairs, arm="y", against="x")["why"] == "two builds of store: 7, 8"
    moved = seen | {"y": '{"engine": "2", "store": "8"}'}
    pairs, _ = compare(*sweep(["none", "x", "y"], versions=moved, backend_version=asked))
    assert row_of(pairs, arm="y", against="x")["why"] == "two builds of engine: 1, 2"


def test_a_component_that_only_one_arm_has_does_not_forbid_the_pair():
    pairs, _ = compare(*sweep(["none", "x"], versions={"x": '{"engine": "1", "store": "7"}'}))
    assert "not comparable" not in set(pairs["verdict"])


def test_backends_under_different_budgets_are_compared_with_the_control_only():
    pairs, _ = compare(*sweep(["none", "x", "y"], budget_gb={"y": 200.0}))
    assert row_of(pairs, arm="y", against="x")["why"] == "host memory budgets differ: 200 GB and 100 GB"
    assert row_of(pairs, arm="y")["verdict"] == "no difference"


def test_a_point_that_is_not_ok_is_in_no_ratio():
    table, requests = sweep(["none", "x"])
    table.loc[1, ["status", "reasons"]] = ["invalid", "offload_not_proven"]
    pairs, arms = compare(table, requests)
    assert set(pairs["why"]) == {"x is invalid: offload_not_proven"}
    assert set(arms["arm"]) == {"none"}


def test_a_repeat_that_failed_leaves_the_others():
    table, requests = sweep(["none", "x"], {"x": 0.5}, repeats=3)
    table.loc[1, ["status", "reasons"]] = ["failed", "engine_died"]
    del requests["x-1"]
    found = row_of(compare(table, requests).pairs)
    assert (found["repeats"], found["against_repeats"]) == (2, 3)
    assert found["points"] == "x-2;x-3"


def test_percentiles_of_repeats_are_of_all_requests_and_rates_are_averaged():
    table, requests = sweep(["none", "x"], repeats=2)
    table.loc[table["point"] == "x-2", "output_tok_per_s_per_gpu"] = 3.0
    pairs, _ = compare(table, requests)
    together = pd.concat([requests["x-1"], requests["x-2"]])["ttft_s"]
    assert row_of(pairs)["value"] == pytest.approx(together.median())
    assert row_of(pairs, "output_tok_per_s_per_gpu")["value"] == 2.0


def test_a_percentile_below_its_minimum_is_not_enough_data():
    found = row_of(compare(*sweep(["none", "x"])).pairs, "ttft_p99_s")
    assert found["verdict"] == "not enough data"
    assert found["why"] == "96 requests in x, it needs 200"
    assert np.isnan(found["value"])


def test_few_sessions_give_a_ratio_without_a_verdict():
    found = row_of(compare(*sweep(["none", "x"], {"x": 0.2}, sessions=5)).pairs)
    assert (found["verdict"], found["why"]) == ("not enough data", "5 sessions, it needs 6")
    assert found["ratio"] == pytest.approx(0.2, rel=0.2)


@pytest.mark.parametrize(
    ("ratio", "ends", "better", "noise", "expected"),
    [
        (0.5, (0.4, 0.6), "lower", (None, None), "better"),
        (0.5, (0.4, 0.6), "higher", (None, None), "worse"),
        (1.5, (1.2, 1.9), "higher", (0.95, 1.05), "better"),
        (1.0, (0.95, 1.04), "lower", (None, None), "no difference"),
        (1.0, (0.5, 2.0), "lower", (None, None), "not enough data"),
        (1.05, (1.02, 1.08), "lower", (0.9, 1.11), "no difference"),
        (1.6, (1.2, 1.9), "lower", (0.5, 2.0), "not enough data"),
    ],
)
def test_verdicts(ratio, ends, better, noise, expected):
    assert verdict(ratio, ends, better, noise)[0] == expected


@given(st.floats(0.01, 100), st.floats(1.0, 3.0), st.floats(1.0, 3.0))
def test_swapping_the_arms_swaps_better_and_worse(ratio, down, up):
    low, high = ratio / down, ratio * up
    swapped = {"better": "worse", "worse": "better"}
    said, other = verdict(ratio, (low, high), "lower")[0], verdict(1 / ratio, (1 / high, 1 / low), "lower")[0]
    if said in swapped or other in swapped:
        assert other == swapped[said]


def test_the_front_is_strict_and_keeps_ties():
    x, y = pd.Series([1.0, 2.0, 2.0, 3.0, 1.5, np.nan]), pd.Series([9.0, 5.0, 5.0, 1.0, 5.0, 99.0])
    assert pareto_front(x, y).tolist() == [True, True, True, True, False, False]


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=25))
def test_no_point_of_the_front_is_dominated_and_every_other_is(points):
    x, y = (pd.Series(side, dtype=float) for side in zip(*points, strict=True))

    def beats(a, b):
        return a[0] >= b[0] and a[1] >= b[1] and a != b

    expected = [not any(beats(other, point) for other in points) for point in points]
    assert pareto_front(x, y).tolist() == expected


# ------------------------------------------------------------------------------------------ the committed example
@pytest.fixture(scope="module")
def real():
    points, table, requests, _ = gallery.real()
    return points, table, compare(table, requests)


def test_the_real_sweep_says_that_the_host_cache_wins_at_six_sessions(real):
    _, _, (pairs, _) = real
    six = pairs[pairs["concurrency"] == 6].set_index("metric")
    assert six.loc["ttft_p50_s", "verdict"] == "better"
    assert six.loc["cached_share", "verdict"] == "better"
    # Two repeats of a 30 s replay are noisy, and the comparison says so.
    assert six.loc["ttft_p90_s", "verdict"] == "not enough data"
    assert pairs["noise_high"].notna().any()


def test_values_of_a_single_run_are_those_of_the_metrics_stage(real):
    _, table, _ = real
    once = table[table["repeat"] == 1]
    _, _, requests, _ = gallery.real()
    _, arms = compare(once, requests)
    for _, row in arms.dropna(subset=["value"]).iterrows():
        cell = once[(once["arm"] == row["arm"]) & (once["concurrency"] == row["concurrency"])].iloc[0]
        assert row["value"] == pytest.approx(cell[row["metric"]], rel=2e-3), row["metric"]


def test_the_summary_names_every_pair_and_every_unusable_point():
    points, table, requests = synthetic.sweep()
    pairs, _ = compare(table, requests)
    text = summary(table, pairs, explain(table, pairs))
    assert re.search(
        r"^\* Not comparable at concurrency 64 \(\d of the pairs\): lmcache failed: engine_died\.$", text, re.M
    )
    usable = pairs[~pairs["verdict"].isin(REFUSED)]
    for _, pair in usable.drop_duplicates(["concurrency", "arm", "against"]).iterrows():
        names = f"{pair['arm']} against {pair['against']}"
        assert (f"### {names}, concurrency {pair['concurrency']}" in text) == (pair["against"] == "none")
        assert (f"* Concurrency {pair['concurrency']}: {names}: " in text) == (pair["against"] != "none")
    for point in points:
        listed = f"* `{point.id}`" in text
        assert listed == (table[table["point"] == point.id].iloc[0]["status"] in ("invalid", "failed"))
    missing = int((table["status"] == "missing").sum())
    assert (f"* {missing} points are not measured yet" in text) == (missing > 0)


@pytest.mark.parametrize(("repeats", "shown"), [(1, r"\|\s+-\s+"), (3, r"\| 0\.\d+ to 1\.\d+ +")])
def test_the_summary_says_how_far_equal_arms_lie_apart(repeats, shown):
    table, requests = sweep(["none", "x"], {"x": 0.5}, repeats=repeats)
    pairs, _ = compare(table, requests)
    text = summary(table, pairs, pd.DataFrame(columns=["group", "concurrency", "arm", "against", "says"]))
    assert "| 95 % interval" in text
    assert re.search(rf"^\| ttft_p50_s .*{shown}\| better", text, re.M)


def test_the_headline_says_a_loss_as_plainly_as_a_win():
    pairs, _ = compare(*sweep(["none", "x"], {"x": 2.0}))
    said = headline(pairs)
    assert said.startswith("x against none: worse in ttft_p50_s (x")
    refused, _ = compare(*sweep(["none", "x"], definition_version={"x": 2}))
    assert headline(refused).startswith("x against none: not comparable (two metric definitions")


def test_numbers():
    assert [number(one) for one in (np.nan, 0.00123456, 12.345, 123456.7, 0.0)] == [
        "-",
        "0.00123",
        "12.3",
        "123,457",
        "0",
    ]


def test_versions_in_the_table_are_what_the_runs_read_back(real):
    _, table, _ = real
    assert json.loads(table.iloc[0]["versions"]).keys()
    assert table["trace_sha256"].nunique() == 1
