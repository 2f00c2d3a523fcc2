"""Time the comparison and figures of about 500 points: `python -m tests.benchmarks.comparison`.

Eight groups of the made-up sweep: 4 arms x 4 concurrencies x 4 repeats each, 720 requests a point.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pandas as pd

from tests.examples import synthetic
from workflow.comparison import compare, summary
from workflow.explanation import explain
from workflow.fairness import fairness_table
from workflow.figures import Tables, draw, draw_timeline
from workflow.report import FIGURES, Content, page
from workflow.style import render

GROUPS = 8
REPEATS = 4
TURNS = 5
"""Copies of each request, a little apart in time to first token."""


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Print the wall-clock and processor seconds of a block as a row of a Markdown table."""
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    print(f"| {what} | {time.perf_counter() - wall:.1f} | {time.process_time() - cpu:.1f} |", flush=True)


def main() -> None:
    """Print the table."""
    all_points, table, requests = synthetic.sweep(REPEATS)
    newest = table[table["entry"] == 1]
    points = [
        point.model_copy(update={"id": f"{point.id}-{i}", "group": f"{point.group}-{i}"})
        for i in range(GROUPS)
        for point in all_points
        if point.origin.entry == 1
    ]
    copies = [
        newest.assign(**{name: newest[name] + f"-{i}" for name in ("point", "group", "curve")}) for i in range(GROUPS)
    ]
    table = pd.concat(copies, ignore_index=True)
    rng = np.random.default_rng(1)
    longer = {point: pd.concat([frame] * TURNS, ignore_index=True) for point, frame in requests.items()}
    for frame in longer.values():
        frame["ttft_s"] *= np.exp(rng.normal(0, 0.1, len(frame)))
    requests = {f"{point}-{i}": frame for i in range(GROUPS) for point, frame in longer.items()}
    print(f"{len(table)} points, {sum(len(requests[p]) for p in table['point'] if p in requests):,} requests\n")
    print("| step | wall (s) | processor (s) |\n|---|---|---|")
    with timed("everything"):
        with timed("pairs, intervals, verdicts"):
            pairs, arms = compare(table, requests)
        with timed("explanations, fairness, summary"):
            explanations, fairness = explain(table, pairs), fairness_table(points, table)
            summary(table, pairs, explanations)
        figures = {}
        for name in FIGURES:
            with timed(f"figure {name}, SVG and PNG"):
                figure = draw(name, Tables(table, pairs, arms))
                figures[name] = render(figure, "svg").decode()
                render(figure, "png")
        with timed("a time sheet for each point, SVG"):
            sheet = synthetic.timeline(all_points[0])
            for point in points:
                render(draw_timeline(point.id, sheet), "svg")
        with timed("report"):
            text = page(Content(table, pairs, explanations, fairness, points, figures))
    print(f"\n{len(pairs)} verdicts, report of {len(text) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
