"""How sure a number is: resampling of sessions, percentiles of resamples, noise between repeats. Pure.

Requests of one session share its prefix, its length and its moment, so they are not independent. A bootstrap over
requests would give intervals that are far too narrow; sessions are resampled, each with all of its requests.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

# Not scipy.stats, which scipy loads at its first use: figures and the report import this module and need none of it,
# and it would take nearly half of the time until they start.
import scipy

from workflow.definitions import MINIMUM_SAMPLES, PERCENTILES

CONFIDENCE = 0.95
RESAMPLES = 999
BLOCK = 64
"""Sorted requests per block of a weighted percentile: any size gives the same numbers, this one is fast."""

Floats = npt.NDArray[np.float64]
Codes = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Sample:
    """The successful profiled requests of one arm at one concurrency, all repeats together."""

    columns: Mapping[str, Floats]
    """ttft_s, e2e_s, tpot_s, input_tokens, output_tokens, total_tokens, cached_tokens; NaN is unknown."""
    sessions: Codes
    """Session of each request, as an index into the sessions of the whole cell."""
    spans: pd.DataFrame
    """One row a session and repeat: session, span_s (seconds from its first start to its last end)."""

    @cached_property
    def session_count(self) -> int:
        """Return how many sessions this arm got to."""
        return int(np.unique(self.sessions).size)


def samples_of(requests: Mapping[str, Sequence[pd.DataFrame]]) -> dict[str, Sample]:
    """Return a sample for each arm of a cell; all of them count the same sessions.

    `requests` holds each arm's repeats: frames with session, conversation, turn, agent_depth, start_s, ttft_s, e2e_s,
    input_tokens, output_tokens and cached_tokens. A session is known by the recorded conversation it replays: the
    client's own session ids are new in every run, and sub-agents belong to the session that started them.
    """
    joined = {
        arm: pd.concat([_named(frame).assign(run=i) for i, frame in enumerate(frames)], ignore_index=True)
        for arm, frames in requests.items()
        if frames
    }
    everything = sorted({name for frame in joined.values() for name in frame["root"].unique()})
    codes = {name: i for i, name in enumerate(everything)}
    return {arm: _sample(frame, codes) for arm, frame in joined.items()}


def _named(frame: pd.DataFrame) -> pd.DataFrame:
    plain = frame.assign(session=frame["session"].astype(str), conversation=frame["conversation"].astype(str))
    first = plain.sort_values(["agent_depth", "start_s"], kind="stable").drop_duplicates("session")
    return plain.assign(root=plain["session"].map(first.set_index("session")["conversation"]))


def _sample(frame: pd.DataFrame, codes: Mapping[str, int]) -> Sample:
    out = frame["output_tokens"].to_numpy(np.float64)
    steps = np.where(out >= 2, out - 1, np.nan)
    columns = {name: frame[name].to_numpy(np.float64) for name in ("ttft_s", "e2e_s", "input_tokens", "cached_tokens")}
    columns["output_tokens"] = out
    columns["total_tokens"] = columns["input_tokens"] + out
    columns["tpot_s"] = (columns["e2e_s"] - columns["ttft_s"]) / steps
    sessions = np.asarray(frame["root"].map(codes), np.int64)
    ends = frame["start_s"] + frame["e2e_s"]
    lives = pd.DataFrame({"session": sessions, "run": frame["run"], "start": frame["start_s"], "end": ends})
    spans = lives.groupby(["session", "run"], as_index=False).agg(start=("start", "min"), end=("end", "max"))
    spans["span_s"] = spans["end"] - spans["start"]
    return Sample(columns, sessions, spans[["session", "span_s"]])


# ------------------------------------------------------------------------------------------------ statistics
Statistic = Callable[[Sample, npt.NDArray[np.int64]], Floats]
"""(sample, how often each session was drawn: resamples x sessions) -> a value a resample, NaN where there is none."""


@dataclass(frozen=True)
class Compared:
    """One metric that arms are compared by."""

    name: str
    """A definition's name and a column of the metrics table."""
    better: Literal["lower", "higher"]
    statistic: Statistic
    least: int = 1
    """Requests that it needs."""
    column: str = "output_tokens"
    """Requests without this are not counted."""
    of_requests: bool = True
    """Repeats are pooled request by request; False: the value is the mean of the repeats' own values."""


def percentile_of(column: str, percent: float) -> Statistic:
    """Return a statistic: the percentile of a column's positive values, linear between the two nearest ranks."""

    def statistic(sample: Sample, counts: npt.NDArray[np.int64]) -> Floats:
        values = sample.columns[column]
        known = np.flatnonzero(np.isfinite(values) & (values > 0))
        order = known[np.argsort(values[known], kind="stable")]
        return resampled_percentile(values[order], sample.sessions[order], counts, percent)

    return statistic


def resampled_percentile(ordered: Floats, sessions: Codes, counts: npt.NDArray[np.int64], percent: float) -> Floats:
    """Return the percentile of each resample: that of the values, each taken as often as its session was drawn.

    `ordered` ascends; `sessions` gives each value's session. The same numbers as numpy.percentile over the repeated
    values (a test compares them), without building them: blocks of values are counted first, then one block is opened.
    """
    if ordered.size == 0:
        return np.full(counts.shape[0], np.nan)
    blocks = -(-ordered.size // BLOCK)
    cells = sessions * blocks + np.arange(ordered.size) // BLOCK
    held = np.bincount(cells, minlength=counts.shape[1] * blocks).reshape(counts.shape[1], blocks).astype(np.float64)
    upto = (counts.astype(np.float64) @ held).cumsum(axis=1)
    total = upto[:, -1]
    padded = np.concatenate([sessions, np.zeros(blocks * BLOCK - ordered.size, np.int64)]).reshape(blocks, BLOCK)
    filled = (np.arange(blocks * BLOCK) < ordered.size).reshape(blocks, BLOCK)

    def at_rank(rank: Floats) -> Floats:
        """Return the value with `rank` values before it, for each resample."""
        block = np.minimum((upto <= rank[:, None]).sum(axis=1), blocks - 1)
        before = np.where(block > 0, np.take_along_axis(upto, np.maximum(block - 1, 0)[:, None], axis=1)[:, 0], 0.0)
        weights = np.take_along_axis(counts, padded[block], axis=1) * filled[block]
        inside = before[:, None] + weights.cumsum(axis=1)
        place = np.minimum(block * BLOCK + (inside <= rank[:, None]).sum(axis=1), ordered.size - 1)
        return np.asarray(ordered[place], np.float64)

    position = np.maximum(total - 1, 0.0) * percent / 100
    lower = np.floor(position)
    low, high = at_rank(lower), at_rank(np.minimum(lower + 1, np.maximum(total - 1, 0.0)))
    return np.where(total > 0, low + (high - low) * (position - lower), np.nan)


def ratio_of(numerator: str, denominator: str) -> Statistic:
    """Return a statistic: the sum of one column / the sum of another, over requests that have both."""

    def statistic(sample: Sample, counts: npt.NDArray[np.int64]) -> Floats:
        both = np.isfinite(sample.columns[numerator]) & np.isfinite(sample.columns[denominator])
        codes, size = sample.sessions[both], counts.shape[1]
        top, bottom = (np.bincount(codes, sample.columns[name][both], size) for name in (numerator, denominator))
        weights = counts.astype(np.float64)
        return _divided(weights @ top, weights @ bottom)

    return statistic


def per_live_second(column: str) -> Statistic:
    """Return a statistic: tokens / seconds that sessions were live.

    With a fixed number of live sessions the throughput is that number times this rate. The sum of tokens alone would
    vary with the lengths of the sessions that were drawn, although longer ones also hold their place for longer.
    """

    def statistic(sample: Sample, counts: npt.NDArray[np.int64]) -> Floats:
        size = counts.shape[1]
        made = np.bincount(sample.sessions, np.nan_to_num(sample.columns[column]), size)
        lived = np.bincount(sample.spans["session"], sample.spans["span_s"], size)
        weights = counts.astype(np.float64)
        return _divided(weights @ made, weights @ lived)

    return statistic


def _divided(top: Floats, bottom: Floats) -> Floats:
    return np.asarray(np.divide(top, bottom, out=np.full(top.shape, np.nan), where=bottom > 0), np.float64)


def _percentiles(prefix: str, column: str, names: Sequence[str]) -> list[Compared]:
    return [
        Compared(f"{prefix}_{name}_s", "lower", percentile_of(column, PERCENTILES[name]), MINIMUM_SAMPLES[name], column)
        for name in names
    ]


COMPARED: tuple[Compared, ...] = (
    *_percentiles("ttft", "ttft_s", ("p50", "p90", "p99")),
    *_percentiles("tpot", "tpot_s", ("p50", "p90")),
    *_percentiles("e2e", "e2e_s", ("p50", "p90")),
    Compared("output_tok_per_s_per_gpu", "higher", per_live_second("output_tokens"), of_requests=False),
    Compared("total_tok_per_s_per_gpu", "higher", per_live_second("total_tokens"), of_requests=False),
    Compared("cached_share", "higher", ratio_of("cached_tokens", "input_tokens"), 1, "cached_tokens", False),
)
"""In the order in which they are shown."""


# ------------------------------------------------------------------------------------------------ resampling
@dataclass(frozen=True)
class Resampled:
    """One metric of one arm under resampling."""

    estimate: float
    """The statistic of the sessions as they were."""
    draws: Floats
    """The statistic of each resample. Draw i of every arm of a cell is of the same sessions."""


def resample(samples: Mapping[str, Sample]) -> dict[tuple[str, str], Resampled]:
    """Return (arm, metric) -> the metric under a bootstrap over the sessions of a cell.

    All arms replay the same set in the same order, so one draw of sessions is used for all of them: what a session
    contributes to both arms cancels in their ratio. A session that only a faster arm got to counts for that arm alone.
    """
    keys = [(arm, metric) for arm in samples for metric in COMPARED]
    size = max((int(sample.sessions.max()) + 1 for sample in samples.values()), default=0)
    if not keys or size < 2:
        return {}

    def statistic(drawn: npt.NDArray[np.int64], axis: int = -1) -> Floats:  # noqa: ARG001 - scipy passes the last
        rows = np.atleast_2d(drawn)
        counts = np.zeros((len(rows), size), np.int64)
        np.add.at(counts, (np.arange(len(rows))[:, None], rows), 1)
        values = np.stack([metric.statistic(samples[arm], counts) for arm, metric in keys])
        return values if drawn.ndim > 1 else values[:, 0]

    everyone = np.arange(size)
    result = scipy.stats.bootstrap(
        (everyone,),
        statistic,
        n_resamples=RESAMPLES,
        method="percentile",
        vectorized=True,
        # The same table gives the same interval on every machine.
        rng=np.random.default_rng(0),
    )
    estimates = statistic(everyone)
    return {
        (arm, metric.name): Resampled(float(estimates[i]), np.asarray(result.bootstrap_distribution[i], np.float64))
        for i, (arm, metric) in enumerate(keys)
    }


def interval(draws: Floats, sessions: int) -> tuple[float, float] | None:
    """Return the 95 % interval of resampled values, or None where too many resamples have no value.

    The percentile interval is too narrow for few sessions, as a normal interval is without Student's t; its
    percentiles are moved outwards by the same factor: Phi(-sqrt(n / (n - 1)) * t(n - 1)) for n sessions
    (T. Hesterberg, What Teachers Should Know About the Bootstrap, 2015, section 5.3, expanded percentile interval).
    """
    known = draws[np.isfinite(draws)]
    if sessions < 2 or known.size < 0.95 * draws.size:
        return None
    tail = _tail(sessions)
    low, high = np.quantile(known, [tail, 1 - tail])
    return float(low), float(high)


@cache
def _tail(sessions: int) -> float:
    return float(scipy.stats.norm.cdf(-np.sqrt(sessions / (sessions - 1)) * _t(sessions - 1)))


@cache
def _t(freedom: int) -> float:
    return float(scipy.stats.t.ppf((1 + CONFIDENCE) / 2, freedom))


# ------------------------------------------------------------------------------------------------ noise of repeats
@dataclass(frozen=True)
class Noise:
    """How much one metric varies between repeats of the same arm."""

    log_sd: float
    """Standard deviation of the logarithm, pooled over the arms and concurrencies of a group."""
    freedom: int
    """Repeats - 1, summed over arms and concurrencies."""

    def band(self, repeats: int, other: int) -> tuple[float, float]:
        """Return the 95 % range of the ratio of two arms that are the same (A/A), with so many repeats each."""
        width = _t(self.freedom) * self.log_sd * np.sqrt(1 / repeats + 1 / other)
        return float(np.exp(-width)), float(np.exp(width))


def noise_between(values: Sequence[Sequence[float]]) -> Noise | None:
    """Return the noise of repeats, each inner sequence those of one arm and concurrency; None without any repeat.

    The noise is taken to be the same share of the value in all arms and concurrencies of a group: three repeats of
    one cell alone would say next to nothing about it.
    """
    squares, freedom = 0.0, 0
    for repeats in values:
        logs = np.log([value for value in repeats if np.isfinite(value) and value > 0])
        if logs.size >= 2:
            squares += float(((logs - logs.mean()) ** 2).sum())
            freedom += logs.size - 1
    return Noise(float(np.sqrt(squares / freedom)), freedom) if freedom else None
