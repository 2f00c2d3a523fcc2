"""Results of jobs that outlived their head process."""

import os
import time

import pytest

from workflow import adoption
from workflow.adoption import adopt, live_holders, lock_advice, result_of
from workflow.contract import InputError
from workflow.jobs import Job
from workflow.lease import Lease, _born
from workflow.runs import Host, Run


def a_run(point="p", attempt="job7-20260101T000000", started=1.0):
    return Run(
        schema_version=1,
        point=point,
        attempt=attempt,
        started_unix_s=started,
        phases_s={},
        startup_s=1.0,
        versions={},
        findings=(),
        proofs={},
        services=(),
        client_argv=(),
        client_exit_code=0,
        trace_content_sha256="0",
        traces=1,
        ceiling_share=0.5,
        host=Host(name="n", cpu="c", cores=1, memory_bytes=1, kernel="k", python="3"),
        git_revision=None,
        artefacts=(),
    )


def a_lease(runs, point, **changes):
    fields = {"attempt": "a1", "host": os.uname().nodename, "pid": os.getpid(), "born": _born(os.getpid())}
    lease = Lease(**{**fields, "stopping": False, **changes})
    (runs / point).mkdir(parents=True, exist_ok=True)
    (runs / point / "lease.json").write_text(lease.model_dump_json())


def test_queued_and_running_jobs_hold_their_points(tmp_path):
    queued = [Job("7", "p", "RUNNING"), Job("8", "q", "PENDING"), Job("9", "r", "FAILED"), Job("10", "x", "RUNNING")]
    assert live_holders(["p", "q", "r"], queued, tmp_path) == {"p": ("job7-",), "q": ("job8-",)}


def test_a_job_whose_points_take_turns_holds_those_that_it_has_not_measured(tmp_path):
    """The first is taken over while the job goes on with the second."""
    queued = [Job("7", point, "RUNNING", allocation="0123456789-1") for point in ("p", "q")]
    a_run().write(tmp_path / "p/job7-20260101T000000/run.json")
    assert live_holders(["p", "q"], queued, tmp_path) == {"q": ("job7-",)}


def test_a_live_lease_holds_a_point_that_slurm_does_not_know(tmp_path):
    a_lease(tmp_path, "p")
    a_lease(tmp_path, "q", born="1")  # the pid is somebody else's by now
    a_lease(tmp_path, "r", stopping=True)
    a_lease(tmp_path, "other")
    assert live_holders(["p", "q", "r"], [], tmp_path) == {"p": ("a1",)}


def test_a_lease_of_another_node_counts_while_it_is_renewed(tmp_path):
    a_lease(tmp_path, "p", host="elsewhere")
    assert live_holders(["p"], [], tmp_path) == {"p": ("a1",)}
    old = time.time() - 3600
    os.utime(tmp_path / "p/lease.json", (old, old))
    assert live_holders(["p"], [], tmp_path) == {}


def test_only_an_attempt_of_the_holder_is_taken_over(tmp_path):
    a_run(attempt="job6-x", started=9.0).write(tmp_path / "job6-x/run.json")
    a_run(attempt="job70-x", started=9.0).write(tmp_path / "job70-x/run.json")
    assert result_of(tmp_path, ("job7-",), "p") is None
    a_run().write(tmp_path / "job7-20260101T000000/run.json")
    a_run(attempt="job7-later", started=2.0).write(tmp_path / "job7-later/run.json")
    assert result_of(tmp_path, ("job7-",), "p").attempt == "job7-later"
    assert result_of(tmp_path, ("job7-",), "another point") is None


def test_a_half_written_result_is_an_error_not_a_result(tmp_path):
    """S14."""
    (tmp_path / "job7-x").mkdir()
    (tmp_path / "job7-x/run.json").write_text('{"schema_version": 1, "point"')
    with pytest.raises(InputError, match="not JSON"):
        result_of(tmp_path, ("job7-",), "p")


@pytest.fixture
def _impatient(monkeypatch):
    monkeypatch.setattr(adoption, "POLL_S", 0.0)
    monkeypatch.setattr(adoption, "SETTLE_S", 0.0)


@pytest.mark.usefixtures("_impatient")
def test_the_result_is_published_only_when_the_holder_has_ended(tmp_path):
    looks = []

    def alive():
        looks.append((tmp_path / "run.json").exists())
        if len(looks) == 3:
            a_run().write(tmp_path / "job7-20260101T000000/run.json")
        return len(looks) < 4

    assert adopt("p", tmp_path, ("job7-",), alive=alive, say=lambda _text: None) == 0
    assert looks == [False] * 4
    assert Run.read(tmp_path / "run.json") == a_run()


@pytest.mark.usefixtures("_impatient")
def test_a_holder_that_left_nothing_is_a_failure(tmp_path):
    said = []
    assert adopt("p", tmp_path, ("job7-",), alive=lambda: False, say=said.append) == 1
    assert not (tmp_path / "run.json").exists()
    assert "left no result" in said[-1]


def test_a_lock_that_nobody_holds_is_explained(tmp_path):
    assert lock_advice(tmp_path) is None
    (tmp_path / ".snakemake/locks").mkdir(parents=True)
    assert lock_advice(tmp_path) is None
    (tmp_path / ".snakemake/locks/0.input.lock").touch()
    advice = lock_advice(tmp_path)
    assert "snakemake --unlock" in advice
    assert "another machine" in advice
