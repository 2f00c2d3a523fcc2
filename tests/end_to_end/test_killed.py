"""A sweep killed during a replay: nothing runs on, nothing half-written counts, a rerun ends well."""

import os
import signal

import pytest

from tests.end_to_end.conftest import end, running_in, wait_for
from workflow.runs import Run

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number.name)
def test_a_killed_sweep_leaves_nothing_and_finishes_when_started_again(fresh, number):
    sweep = fresh.start()
    try:
        # The client is at work: its own processes, the engine and the guard are all there.
        wait_for(lambda: list(fresh.results.glob("runs/*/*/client/logs/aiperf.log")), 60, "a replay")
        os.kill(sweep.pid, number)
        # SIGTERM lets Snakemake wait for its running jobs.
        wait_for(lambda: sweep.poll() is not None, 90, "the end of Snakemake")
    finally:
        end(sweep)
    wait_for(lambda: not running_in(fresh.results / "runs"), 30, f"the end of {running_in(fresh.results / 'runs')}")
    wait_for(lambda: not list(fresh.results.glob("runs/*/lease.json")), 30, "the end of the job itself")
    for path in fresh.runs():
        Run.read(path)
    measured = len(fresh.runs())
    assert measured < 2

    if number == signal.SIGKILL:
        refused = fresh.snakemake(check=False)
        assert "--unlock" in refused.stderr
        fresh.snakemake("--unlock")
    fresh.snakemake("--rerun-incomplete", "--until", "metrics")
    assert len(fresh.runs()) == 2
    assert (fresh.results / "metrics.csv").exists()
    assert not running_in(fresh.results / "runs")
    failures = list(fresh.results.glob("failures/*.json"))
    assert all("interrupted" in path.read_text() for path in failures)
