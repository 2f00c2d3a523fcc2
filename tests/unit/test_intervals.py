"""Intervals: percentiles of resamples, coverage on data whose truth is known, noise between repeats."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workflow import intervals
from workflow.intervals import COMPARED, Noise, interval, noise_between, resample, resampled_percentile, samples_of

SETTINGS = settings(deadline=None, max_examples=60)


@SETTINGS
@given(
    st.lists(st.tuples(st.floats(0.001, 1000), st.integers(0, 5)), min_size=1, max_size=300),
    st.lists(st.integers(0, 3), min_size=6, max_size=6),
    st.sampled_from([0.0, 10.0, 50.0, 90.0, 99.0, 100.0]),
)
def test_percentile_of_a_resample_is_numpys_over_the_repeated_values(rows, counts, percent):
    rows.sort()
    values = np.array([value for value, _ in rows])
    sessions = np.array([session for _, session in rows])
    drawn = np.array([counts, [1] * 6])
    found = resampled_percentile(values, sessions, drawn, percent)
    for result, weights in zip(found, drawn, strict=True):
        repeated = np.repeat(values, weights[sessions])
        if repeated.size:
            assert result == pytest.approx(np.percentile(repeated, percent))
        else:
            assert np.isnan(result)


def requests(rng, sessions, turns, effect=1.0, session_spread=0.6, own_spread=0.3, effects=None, cached=0.5):
    """Return requests whose TTFT is lognormal with a session effect; the ratio of two arms' percentiles is `effect`."""
    effects = rng.normal(0, session_spread, sessions) if effects is None else effects
    rows = []
    for session in range(sessions):
        start = 0.0
        for turn in range(turns):
            ttft = effect * np.exp(effects[session] + rng.normal(0, own_spread))
            rows.append((f"uuid-{rng.integers(1 << 40)}" if turn == 0 else rows[-1][0], f"trace-{session}", turn))
            rows[-1] += (0, start, ttft, ttft + 1.0, 100.0, 11.0, 100.0 * cached)
            start += ttft + 1.0
    columns = ["session", "conversation", "turn", "agent_depth", "start_s", "ttft_s", "e2e_s"]
    return pd.DataFrame(rows, columns=[*columns, "input_tokens", "output_tokens", "cached_tokens"])


@pytest.mark.parametrize(("sessions", "metric"), [(8, "ttft_p50_s"), (24, "ttft_p50_s"), (24, "ttft_p90_s")])
def test_the_interval_of_a_ratio_covers_the_truth_as_often_as_it_says(monkeypatch, sessions, metric):
    # Different sessions in both arms, the hardest case: nothing cancels. 95 % of 100 intervals, give or take 3 sd;
    # docs/comparison.md has more.
    monkeypatch.setattr(intervals, "RESAMPLES", 299)
    monkeypatch.setattr(intervals, "COMPARED", tuple(one for one in COMPARED if one.name == metric))
    rng, truth, held = np.random.default_rng(7), 0.6, 0
    trials = 100
    for _ in range(trials):
        a = requests(rng, sessions, 6, truth)
        b = requests(rng, sessions, 6)
        b["conversation"] += "-other"
        found = resample(samples_of({"a": [a], "b": [b]}))
        low, high = interval(found["a", metric].draws / found["b", metric].draws, sessions)
        held += low <= truth <= high
    assert held / trials >= 0.885


def test_a_bootstrap_over_requests_would_be_far_too_sure():
    # Why sessions are resampled: the same data, each request its own session, holds the truth much less often.
    rng, truth = np.random.default_rng(3), 1.0
    held = {"sessions": 0, "requests": 0}
    for _ in range(30):
        a, b = requests(rng, 12, 12, truth), requests(rng, 12, 12)
        b["conversation"] += "-other"
        for unit in held:
            if unit == "requests":
                a, b = (
                    frame.assign(session=[f"{side}{i}" for i in range(len(frame))]).assign(
                        conversation=lambda f: f["session"]
                    )
                    for side, frame in (("a", a), ("b", b))
                )
            found = resample(samples_of({"a": [a], "b": [b]}))
            count = 12 if unit == "sessions" else len(a)
            low, high = interval(found["a", "ttft_p50_s"].draws / found["b", "ttft_p50_s"].draws, count)
            held[unit] += low <= truth <= high
    assert held["sessions"] / 30 >= 0.83
    assert held["requests"] / 30 < 0.75


def test_sessions_that_both_arms_replay_cancel_in_the_ratio():
    rng = np.random.default_rng(5)
    effects = rng.normal(0, 1.0, 20)
    a, b = requests(rng, 20, 6, 0.8, effects=effects), requests(rng, 20, 6, effects=effects)
    paired = resample(samples_of({"a": [a], "b": [b]}))
    b["conversation"] += "-other"
    apart = resample(samples_of({"a": [a], "b": [b]}))

    def width(found):
        low, high = interval(found["a", "ttft_p50_s"].draws / found["b", "ttft_p50_s"].draws, 20)
        return np.log(high / low)

    assert width(paired) < 0.6 * width(apart)


def test_repeats_of_a_session_are_one_session_and_so_are_its_sub_agents():
    rng = np.random.default_rng(1)
    first, second = requests(rng, 6, 4), requests(rng, 6, 4)
    child = first.iloc[:3].assign(conversation="child", agent_depth=1, start_s=0.1)
    sample = samples_of({"a": [pd.concat([first, child], ignore_index=True), second]})["a"]
    assert sample.session_count == 6
    assert len(sample.sessions) == 6 * 4 * 2 + 3
    assert len(sample.spans) == 12


def test_the_same_table_gives_the_same_interval():
    a = requests(np.random.default_rng(1), 10, 5)
    one, other = (resample(samples_of({"a": [a]}))["a", "ttft_p50_s"].draws for _ in range(2))
    assert (one == other).all()


def test_throughput_is_not_moved_by_the_length_of_the_sessions_that_were_drawn():
    # All sessions make tokens at one rate, some are ten times as long: the rate is known exactly.
    rows = [
        (f"s{i}", f"t{i}", turn, 0, 2.0 * turn, 1.0, 2.0, 100.0, 10.0, 50.0)
        for i in range(12)
        for turn in range(1 if i % 2 else 10)
    ]
    a = requests(np.random.default_rng(0), 1, 1)
    a = pd.DataFrame(rows, columns=a.columns)
    draws = resample(samples_of({"a": [a]}))["a", "output_tok_per_s_per_gpu"].draws
    assert draws.std() / draws.mean() < 1e-9


def test_an_interval_is_none_where_resamples_have_no_value():
    assert interval(np.array([1.0, np.nan, np.nan]), 10) is None
    assert interval(np.ones(10), 1) is None


def test_fewer_sessions_widen_the_interval():
    draws = np.random.default_rng(0).normal(1, 0.1, 999)
    few, many = interval(draws, 6), interval(draws, 60)
    assert few[0] < many[0] < many[1] < few[1]


def test_noise_of_repeats_holds_ratios_of_equal_arms_as_often_as_it_says():
    rng, inside = np.random.default_rng(11), 0
    for _ in range(400):
        cells = [np.exp(rng.normal(np.log(level), 0.05, 3)) for level in (1, 2, 40, 8)]
        low, high = noise_between(cells).band(3, 3)
        same = np.exp(rng.normal(0, 0.05, (2, 3)).mean(axis=1))
        inside += low <= same[0] / same[1] <= high
    assert 0.92 <= inside / 400 <= 0.98


def test_noise_needs_a_repeat_and_ignores_what_was_not_measured():
    assert noise_between([[1.0], [2.0]]) is None
    assert noise_between([[1.0, float("nan")], []]) is None
    assert noise_between([[1.0, 1.1, float("nan")]]).freedom == 1
    assert Noise(0.1, 100).band(4, 4)[1] < Noise(0.1, 100).band(1, 1)[1] < Noise(0.1, 1).band(1, 1)[1]
