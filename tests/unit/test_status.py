"""The state of every point, from files and Slurm's queue."""

import json
import re
import time

import pytest
from points import point
from test_adoption import a_lease, a_run
from test_jobs import CANCELLED, MEMORY, REFUSED, SUBMITTED, TIME_LIMIT, says

from workflow.contract import Finding, InputError, Reason
from workflow.failures import Failure, FailureClass
from workflow.jobs import Answer, Job
from workflow.metrics import Accounting, PointMetrics
from workflow.points import plan_tsv
from workflow.status import collect, phase_of, render, select, states

LOG = """[10:00:01] p: engine: starting, at most 60 s
[10:00:09] p: engine: ready after 8.0 s
[10:00:10] p: replay: warm-up, 3 requests, about 60 s left
[10:00:20] p: replay: profiling, 9 requests, about 30 s left
some other line
[10:00:25] p: replay: profiling, 19 requests, about 25 s left
"""


@pytest.fixture
def folder(tmp_path):
    """Return a working directory with two planned points."""
    points = [point(), point(backend="vllm-simple")]
    for one in points:
        one.write(tmp_path / f"results/points/{one.id}.json")
    (tmp_path / "results/plan.tsv").write_text(plan_tsv(points, (), {}, ()))
    return tmp_path


@pytest.fixture
def name():
    return point().id


def state_of(folder, name, queued=()):
    return next(state for state in states(folder, queued) if state.point == name)


def judged(folder, name, status, *codes):
    PointMetrics(
        schema_version=PointMetrics.SCHEMA_VERSION,
        point=name,
        status=status,
        findings=tuple(Finding(code=code, detail="numbers") for code in codes),
        accounting=Accounting(
            records_total=0, warmup=0, warmup_failed=0, succeeded=0, failed=0, cancelled=0, unreadable=0
        ),
        definition_version=1,
        values={},
    ).write(folder / f"results/metrics/{name}.json")


def own_record(folder, name, attempt, kind, message="it says", unix_s=1000.0):
    Failure(
        schema_version=1,
        point=name,
        attempt=attempt,
        failure_class=kind,
        message=message,
        first_cause="CUDA error",
        worth_retrying=True,
        unix_s=unix_s,
        logs=(),
    ).write(folder / f"results/failures/{name}.{attempt}.json")


def kept_log(folder, name, job, text):
    path = folder / f".snakemake/slurm_logs/rule_run_point/{name}/{job}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_every_planned_point_has_a_state(folder, name):
    assert [state.state for state in states(folder, [])] == ["planned", "planned"]
    waiting = state_of(folder, name, [Job("7", name, "PENDING", "Resources")])
    assert (waiting.state, waiting.job, waiting.detail) == ("queued", "7", "Resources")


def test_a_point_that_preflight_refuses_says_so(folder, name):
    points = [point(), point(backend="vllm-simple")]
    (folder / "results/plan.tsv").write_text(plan_tsv(points, (), {name: "shm_too_small,memlock"}, ()))
    found = state_of(folder, name)
    assert (found.state, found.reasons) == ("refused", ("shm_too_small", "memlock"))


def test_the_phase_of_a_running_point_and_since_when(folder, name):
    assert phase_of(LOG) == ("replay: profiling", "10:00:20")
    assert phase_of("") is None
    log = folder / f"results/logs/runs/{name}.log"
    log.parent.mkdir(parents=True)
    log.write_text(LOG)
    running = state_of(folder, name, [Job("7", name, "RUNNING", nodes="n1")])
    assert (running.state, running.detail) == ("running", "replay: profiling since 10:00:20 on n1")


def test_a_lease_shows_a_point_that_runs_without_slurm(folder, name):
    a_lease(folder / "results/runs", name)
    assert state_of(folder, name).state == "running"


def test_results_with_and_without_a_verdict(folder, name):
    a_run(point=name).write(folder / f"results/runs/{name}/run.json")
    assert state_of(folder, name).state == "measured"
    judged(folder, name, "ok")
    assert state_of(folder, name).state == "done"
    judged(folder, name, "invalid", Reason.WINDOW_SHORT, Reason.ERROR_SHARE)
    invalid = state_of(folder, name)
    assert (invalid.state, invalid.reasons) == ("invalid", ("error_share_above_limit", "window_short"))


def test_a_half_written_result_is_shown_not_counted(folder, name):
    """S13, S14."""
    path = folder / f"results/runs/{name}/run.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"schema_version": 1, "poi')
    found = state_of(folder, name)
    assert (found.state, found.reasons) == ("failed", ("unreadable_result",))
    assert "delete it" in found.detail


def test_slurms_verdict_explains_what_the_attempt_recorded_itself(folder, name):
    own_record(folder, name, "job7-20260101T000000", FailureClass.INTERRUPTED, "stopped by SIGTERM", time.time())
    assert state_of(folder, name).reasons == ("interrupted",)
    kept_log(folder, name, 7, TIME_LIMIT)
    collect(folder, [Job("7", name, "TIMEOUT", nodes="n1")], says()[0])
    found = state_of(folder, name)
    assert found.reasons == ("time_limit",)
    assert found.attempts_failed == 1
    assert "first cause: CUDA error" in found.detail


def test_what_slurm_forgets_is_kept(folder, name):
    kept_log(folder, name, 7, MEMORY)
    collect(folder, [Job("7", name, "FAILED")], says()[0])
    before = sorted(folder.glob("results/failures/*"))
    assert len(before) == 1
    texts = [path.read_text() for path in before]
    # Later: squeue knows nothing, and the log has been cleaned away.
    (folder / f".snakemake/slurm_logs/rule_run_point/{name}/7.log").unlink()
    collect(folder, [], says()[0])
    assert [path.read_text() for path in sorted(folder.glob("results/failures/*"))] == texts
    assert state_of(folder, name).reasons == ("out_of_memory",)


def test_an_engine_that_died_stays_an_engine_that_died(folder, name):
    own_record(folder, name, "job7-20260101T000000", FailureClass.ENGINE_DIED)
    kept_log(folder, name, 7, "Error in rule run_point")
    collect(folder, [Job("7", name, "FAILED")], says()[0])
    assert state_of(folder, name).reasons == ("engine_died",)


def test_a_try_that_only_repeats_an_earlier_cause_does_not_hide_it(folder, name):
    own_record(folder, name, "job7-20260101T000000", FailureClass.CONFIGURATION)
    kept_log(folder, name, 8, f"{name}: not tried again: configuration: a part is missing\n")
    collect(folder, [Job("7", name, "FAILED"), Job("8", name, "FAILED")], says()[0])
    assert state_of(folder, name).reasons == ("configuration",)


def test_a_job_that_left_nothing_at_all_is_not_lost(folder, name):
    collect(folder, [Job("7", name, "FAILED")], says()[0])
    found = state_of(folder, name)
    assert found.reasons == ("unknown",)
    assert "Slurm job 7 ended as FAILED" in found.detail


@pytest.mark.parametrize(
    ("head_log", "expected"),
    [
        pytest.param(SUBMITTED, "cancelled", id="X23 by somebody else"),
        pytest.param(SUBMITTED + "Terminating processes on user request\n", "interrupted", id="our own Ctrl-C"),
    ],
)
def test_who_cancelled(folder, name, head_log, expected):
    path = folder / ".snakemake/log/2026.snakemake.log"
    path.parent.mkdir(parents=True)
    path.write_text(head_log)
    kept_log(folder, name, 7, CANCELLED)
    sacct = Answer(0, "7|CANCELLED by 1001|None|n1\n", "")
    collect(folder, [Job("7", name, "CANCELLED")], says(sacct=sacct)[0])
    found = state_of(folder, name)
    assert found.reasons == (expected,)
    assert ("1001" in found.detail) == (expected == "cancelled")


def test_s8_a_refused_submission_is_told(folder, name):
    path = folder / ".snakemake/log/2026.snakemake.log"
    path.parent.mkdir(parents=True)
    path.write_text(REFUSED.replace("tiny-c1-063ef09414", name))
    collect(folder, [], says()[0])
    found = state_of(folder, name)
    assert found.reasons == ("submit_refused",)
    assert "invalid partition" in found.detail


def test_a_selection_names_what_is_allowed(folder, name):
    found = states(folder, [])
    assert [one.point for one in select(found, "arm=none,concurrency=14|8")] == [name]
    assert len(select(found, "entry=0")) == 2
    assert select(found, "arm=none,arm=vllm-simple") == []
    for expression, message in (
        ("arm=nope", "allowed: none, vllm-simple"),
        ("colour=red", "allowed: state=..."),
        ("arm", "found 'arm'"),
        ("reason=time_limit", "nothing: no point has one"),
    ):
        with pytest.raises(InputError, match=re.escape(message)):
            select(found, expression)


def test_the_text_counts_every_point_and_says_what_to_do(folder, name):
    kept_log(folder, name, 7, TIME_LIMIT)
    collect(folder, [Job("7", name, "TIMEOUT")], says()[0])
    text = render(states(folder, []))
    assert "2 points: 1 planned, 1 failed" in text
    assert "Slurm job 7 was ended at its time limit" in text
    assert len(render(states(folder, []), problems_only=True).splitlines()) == len(text.splitlines()) - 1
    assert json.loads(states(folder, [])[0].model_dump_json())["point"] == name


def test_without_a_plan_one_message(tmp_path):
    with pytest.raises(InputError, match="nothing is planned yet"):
        states(tmp_path, [])
