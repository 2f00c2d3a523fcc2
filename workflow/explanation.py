"""Why an arm won or lost: sentences derived from what both arms measured. Pure; an unknown number is not guessed."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pandas as pd

from workflow.comparison import REFUSED, headline, number
from workflow.definitions import TIERS

COLUMNS = ("group", "concurrency", "arm", "against", "topic", "says")
SLOW_COPY_GB_PER_S = 10.0
"""Below this a copy between GPU and host is unpinned or made of small blocks (healthy: 40 to 55 on PCIe 5 x16)."""
FULL_SHARE = 0.95
"""A device KV pool that was this full at its peak had to drop or offload something."""
NO_REUSE_SHARE = 0.05
"""A trace with a ceiling below this has nothing to reuse: what differs is what the backend costs."""
MANY_LOOKUPS = 5.0
"""Lookups of a store for each request from which it is worth a sentence; without waiting it is one."""
SAID_SHARE = 0.02
"""Smaller relative differences are not worth a sentence."""


class Both(NamedTuple):
    """One pair at one concurrency: the means of both arms' repeats, and the verdicts about them."""

    arm: str
    against: str
    ours: pd.Series
    theirs: pd.Series
    pairs: pd.DataFrame
    notes: tuple[str, ...] = ()
    """What was noted at the arm's points and not at those it is compared with."""

    def known(self, *names: str) -> bool:
        """Return whether both arms measured all of these."""
        return all(pd.notna(side[name]) for side in (self.ours, self.theirs) for name in names)


def explain(table: pd.DataFrame, pairs: pd.DataFrame) -> pd.DataFrame:
    """Return COLUMNS: sentences for each pair of arms at each concurrency, the verdict first.

    `table` is the sweep's table, `pairs` the pairs of `comparison.compare`. Pairs that were refused say why, only.
    """
    rows = []
    keys = ["group", "concurrency", "arm"]
    good = table[table["status"] == "ok"]
    means = good.groupby(keys)[[name for name in good.select_dtypes("number") if name not in keys]].mean()
    notes = {key: _distinct(some) for key, some in good.groupby(keys)["notes"]}
    for key, verdicts in pairs.groupby(["group", "concurrency", "arm", "against"], sort=False):
        group, concurrency, arm, against = key
        said = [("verdict", headline(verdicts))]
        if not set(verdicts["verdict"]) <= set(REFUSED):
            place: list[Any] = [(group, concurrency, name) for name in (arm, against)]
            ours, theirs = (means.loc[one] for one in place)
            noted, known = (notes[one] for one in place)
            both = Both(str(arm), str(against), ours, theirs, verdicts, tuple(n for n in noted if n not in known))
            said += [(topic, text) for topic, tell in TOPICS for text in tell(both)]
        rows += [dict(zip(COLUMNS, (*key, topic, text), strict=True)) for topic, text in said]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _distinct(notes: pd.Series) -> list[str]:
    """Return the notes of an arm's points, each once."""
    return list(dict.fromkeys(note for text in notes.dropna() for note in text.splitlines()))


# ---------------------------------------------------------------------------------------------------- the topics
def _sources(both: Both) -> Iterator[str]:
    for name, side in ((both.arm, both.ours), (both.against, both.theirs)):
        shares = {tier: side[f"prompt_share_{tier}"] for tier in TIERS if pd.notna(side[f"prompt_share_{tier}"])}
        if {"device", "computed"} <= shares.keys():
            found = ", ".join(f"{share:.1%} from {tier}" for tier, share in shares.items() if tier != "computed")
            yield f"Prompt tokens of {name}: {found}, {shares['computed']:.1%} computed."
        elif pd.notna(side["cached_share"]):
            yield f"Prompt tokens of {name}: {side['cached_share']:.1%} from a cache, its tiers are not told apart."


def _fewer_computed(both: Both) -> Iterator[str]:
    if not both.known("cached_share", "input_tokens_mean", "succeeded"):
        return
    ours, theirs = (1 - side["cached_share"] for side in (both.ours, both.theirs))
    tokens = (theirs - ours) * both.ours["input_tokens_mean"]
    if abs(theirs - ours) < 0.005:
        yield f"Both computed the same share of their prompts ({ours:.1%}), so offload saved no prefill."
        return
    fewer = "fewer" if tokens > 0 else "more"
    text = f"{both.arm} computed {abs(tokens):,.0f} {fewer} prompt tokens a request than at the hit share of "
    text += both.against
    if both.known("ttft_mean_s"):
        text += _saved_against_paid(both)
    yield text + "."


def _saved_against_paid(both: Both) -> str:
    saved = both.theirs["ttft_mean_s"] - both.ours["ttft_mean_s"]
    text = f"; its mean TTFT is {abs(saved):.3g} s {'lower' if saved > 0 else 'higher'} (prefill and queueing)"
    spent, requests = both.ours["transfer_to_device_s"], both.ours["succeeded"]
    if pd.notna(spent) and requests > 0:
        text += f", for {spent / requests:.3g} s of copies to the device a request"
    return text


def _ceiling(both: Both) -> Iterator[str]:
    ceiling, cached = both.ours["ceiling_share"], both.ours["cached_share"]
    if pd.isna(ceiling) or pd.isna(cached):
        return
    if ceiling < NO_REUSE_SHARE:
        yield (
            f"The sessions reuse next to nothing (ceiling {ceiling:.1%}): what differs is what {both.arm} costs where "
            "it cannot help."
        )
        return
    rest = ceiling - cached
    reached = "reached" if rest <= 0.02 else f"{rest:.1%} of the prompt tokens below it"
    yield f"Ceiling of the sessions: {ceiling:.1%} of the prompt tokens; {both.arm} found {cached:.1%} ({reached})."


def _pressure(both: Both) -> Iterator[str]:
    use = both.theirs["device_kv_use_max_share"]
    if pd.notna(use) and use < FULL_SHARE:
        yield (
            f"The device's KV pool was at most {use:.0%} full in {both.against}: the sessions nearly fitted, so there "
            "was little for offload to win."
        )
    elif pd.notna(use):
        yield f"The device's KV pool was full in {both.against} (peak {use:.0%})."
    host = both.ours["host_kv_use_max_share"]
    if pd.notna(host) and host >= FULL_SHARE:
        yield f"The host tier of {both.arm} was full too ({host:.0%}): a larger budget may find more."


def _transfers(both: Both) -> Iterator[str]:
    for direction in ("host", "device"):
        moved, rate = both.ours[f"transfer_to_{direction}_bytes"], both.ours[f"copy_rate_to_{direction}_gb_per_s"]
        if pd.isna(moved):
            continue
        text = f"{both.arm} copied {number(moved / 1e9)} GB to the {direction}"
        if pd.notna(rate):
            limit = both.ours["bus_limit_gb_per_s"]
            text += f" at {rate:.3g} GB/s while it copied, {rate / limit:.0%} of the bus ({limit:.0f} GB/s one way)"
            if rate < SLOW_COPY_GB_PER_S:
                text += ": slow, so the memory is not pinned or the blocks are small"
        yield text + "."
    stored, loaded = both.ours["transfer_to_host_bytes"], both.ours["transfer_to_device_bytes"]
    if pd.notna(stored) and pd.notna(loaded) and stored > 0:
        yield f"Each byte that was stored was loaded {loaded / stored:.2g} times."


def _lookups(both: Both) -> Iterator[str]:
    asked, requests, took = (both.ours[name] for name in ("store_lookups", "succeeded", "store_lookup_s"))
    if not asked / requests >= MANY_LOOKUPS:
        return
    text = (
        f"{both.arm}'s store was asked {asked:,.0f} times which blocks it holds, {asked / requests:.0f} times a "
        "request: one that waits for room on the device is looked up again in each scheduling step"
    )
    if pd.notna(took) and took > 0:
        phase_s = both.ours["window_s"] + both.ours["drain_s"]
        whole = f" of {number(phase_s)} s of window and drain" if pd.notna(phase_s) else ""
        text += f"; the answers took {number(took)} s{whole}, in which a scheduler that waits for them starts nothing"
    yield text + "."


def _preemptions(both: Both) -> Iterator[str]:
    if both.known("preemptions") and both.ours["preemptions"] + both.theirs["preemptions"] > 0:
        yield (
            f"Preemptions: {both.ours['preemptions']:.0f} in {both.arm}, "
            f"{both.theirs['preemptions']:.0f} in {both.against}."
        )


def _queueing(both: Both) -> Iterator[str]:
    if both.known("achieved_concurrency_mean", "busy_share"):
        parts = [
            f"{side['achieved_concurrency_mean']:.2f} in {name} (busy {side['busy_share']:.0%} of the time)"
            for name, side in ((both.arm, both.ours), (both.against, both.theirs))
        ]
        yield f"Requests in flight on average: {', '.join(parts)}; fewer in flight at the same load is less queueing."


def _decoding(both: Both) -> Iterator[str]:
    rows = both.pairs[(both.pairs["metric"] == "tpot_p50_s") & both.pairs["ratio"].notna()]
    change = float(rows["ratio"].iloc[0]) - 1 if len(rows) else 0.0
    if abs(change) < SAID_SHARE:
        return
    cost = "costs" if change > 0 else "saves"
    sure = "" if rows["verdict"].iloc[0] in ("better", "worse") else " (not settled)"
    yield f"Decoding: {both.arm} {cost} {abs(change):.0%} of the median time per output token{sure}."


def _noted(both: Both) -> Iterator[str]:
    for note in both.notes:
        yield f"{both.arm}: {note}."


def _startup(both: Both) -> Iterator[str]:
    if both.known("startup_s"):
        more = both.ours["startup_s"] - both.theirs["startup_s"]
        word = "longer" if more > 0 else "less"
        pinned = both.ours["host_kv_capacity_bytes"]
        of = f" (host tier of {number(pinned / 1e9)} GB)" if pd.notna(pinned) and pinned > 0 else ""
        yield f"Start-up: {number(both.ours['startup_s'])} s{of}, {number(abs(more))} s {word} than {both.against}."


TOPICS: tuple[tuple[str, Callable[[Both], Iterator[str]]], ...] = (
    ("tokens by source", _sources),
    ("prefill", _fewer_computed),
    ("ceiling", _ceiling),
    ("pressure", _pressure),
    ("transfers", _transfers),
    ("lookups", _lookups),
    ("preemptions", _preemptions),
    ("queueing", _queueing),
    ("decoding", _decoding),
    ("start-up", _startup),
    ("noted", _noted),
)
"""In the order in which they are said."""
