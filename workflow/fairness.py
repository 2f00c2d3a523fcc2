"""What differs between arms beside the backend itself: from their serve plans, and from what was seen when they ran."""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import pandas as pd

from workflow.plans import differences
from workflow.points import Point
from workflow.verdict import CONTROL

COLUMNS = ("group", "arm", "against", "concurrencies", "where", "name", "kind", "against_value", "value")
OBSERVED = ("node", "versions", "git_revision")
"""Columns of the sweep's table that should not differ inside a group."""


def fairness_table(points: Iterable[Point], table: pd.DataFrame) -> pd.DataFrame:
    """Return COLUMNS: a row for each thing in which an arm differs from the control of its group.

    `where` is a part of the serve plan (`engine argv`, `service store env`, `host memory`, ...), or `seen` for what was
    observed. `concurrencies` lists those at which the difference is there. An arm without a control has no rows.
    """
    found: dict[tuple[Any, ...], list[int]] = {}
    listed = [point for point in points if point.repeat == 1]
    controls = {(point.group, point.concurrency): point for point in listed if point.arm == CONTROL}
    for point in listed:
        control = controls.get((point.group, point.concurrency))
        if control is None or point.arm == CONTROL:
            continue
        for one in differences(control.plan, point.plan):
            key = (point.group, point.arm, one.where, one.name, one.kind, one.first, one.second)
            found.setdefault(key, []).append(point.concurrency)
    for concurrency, key in _observed(table):
        found.setdefault(key, []).append(concurrency)
    rows = [
        {
            "group": group,
            "arm": arm,
            "against": CONTROL,
            "concurrencies": ", ".join(str(one) for one in sorted(set(where_seen))),
            "where": where,
            "name": name,
            "kind": kind,
            "against_value": first,
            "value": second,
        }
        for (group, arm, where, name, kind, first, second), where_seen in found.items()
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _observed(table: pd.DataFrame) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    narrow = table[["group", "concurrency", "arm", "started_unix_s", *OBSERVED]]
    for (group, concurrency), cell in narrow.groupby(["group", "concurrency"], sort=False):
        control = cell[cell["arm"] == CONTROL]
        if control.empty:
            continue
        for arm, rows in cell[cell["arm"] != CONTROL].groupby("arm", sort=False):
            for column in OBSERVED:
                ours, theirs = (_listed(side[column]) for side in (rows, control))
                if ours and theirs and ours != theirs:
                    yield concurrency, (group, arm, "seen", column, "changed", theirs, ours)
            if turns := _blocks(pd.concat([control, rows])):
                yield concurrency, (group, arm, "seen", "order of runs", "changed", "arms take turns", turns)


def _listed(column: pd.Series) -> str:
    return ", ".join(sorted({str(value) for value in column.dropna()}))


def _blocks(rows: pd.DataFrame) -> str | None:
    """Say so where one arm ran before all of the other: a drift of the node then looks like an effect."""
    order = rows.dropna(subset=["started_unix_s"]).sort_values("started_unix_s")["arm"].tolist()
    switches = sum(a != b for a, b in pairwise(order))
    if len(order) >= 4 and switches == 1:
        return f"all of {order[0]}, then all of {order[-1]}"
    return None
