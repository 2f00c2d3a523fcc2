"""Jobs, clients, disks and clocks that break."""

import errno
import os
import signal
import time

import pytest

from tests.end_to_end.conftest import wait_for
from tests.faults.conftest import end
from workflow import leftovers, runs, watch
from workflow.contract import Reason
from workflow.failures import FailureClass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_signal_to_the_job(bench, number):
    job = bench.with_replay(duration_s=60.0).start()
    try:
        bench.wait_for_records(5)
        os.kill(job.pid, number)
        assert job.wait(30) == 128 + number
    finally:
        end(job)
    assert not bench.left()
    assert bench.failure().failure_class == FailureClass.INTERRUPTED
    # The client was asked to stop first, so it wrote what it had.
    assert (bench.attempts[-1] / "client/profile_export_aiperf.json").exists()
    assert not (bench.out / "run.json").exists()


def test_signal_while_the_server_loads(bench):
    job = bench.engine("--load", "never", deadline_s=60.0).start()
    try:
        wait_for(
            lambda: bench.out.is_dir() and bench.attempts and (bench.attempts[-1] / "engine.log").exists(), 30, "it"
        )
        os.kill(job.pid, signal.SIGTERM)
        assert job.wait(30) == 128 + signal.SIGTERM
    finally:
        end(job)
    assert bench.failure().failure_class == FailureClass.INTERRUPTED


def test_sigkill_of_the_job_and_a_rerun(bench):
    name = f"vllm_offload_{os.getpid()}.mmap"
    long = bench.engine("--child", "--shm", name, "--fill", "<path:kv-tier>").with_plan(scratch=("kv-tier",))
    job = long.with_replay(duration_s=60.0).start()
    try:
        bench.wait_for_records(5)
        job.kill()
        job.wait()
    finally:
        end(job)
    wait_for(lambda: not bench.left(), 15, "the guard's sweep")
    assert not (bench.out / "run.json").exists()
    first = bench.attempts[0]
    assert len(list((first / "scratch/kv-tier").iterdir())) >= 5
    kept = (first / "client/profile_export.jsonl").read_text()
    assert (leftovers.SHM / name).exists()

    assert bench.run() == 0
    assert not (leftovers.SHM / name).exists()
    assert not (first / "scratch").exists(), "the blocks of a file tier, tens of gigabytes"
    assert len(bench.attempts) == 2
    assert bench.published().attempt == bench.attempts[1].name
    assert (first / "client/profile_export.jsonl").read_text() == kept


def test_second_copy_of_the_job(bench, capsys):
    job = bench.with_replay(duration_s=60.0).start()
    try:
        bench.wait_for_records(1)
        assert bench.run() == 1
        assert "already_running: attempt" in capsys.readouterr().err
        assert f"pid {job.pid}" in bench.failure().message
        assert job.poll() is None
        records = len(bench.records())
        bench.wait_for_records(records + 3)  # the first one goes on undisturbed
    finally:
        os.kill(job.pid, signal.SIGTERM)
        job.wait(30)
        end(job)


def test_client_killed(bench):
    job = bench.with_replay(duration_s=60.0).start()
    try:
        bench.wait_for_records(5)
        os.kill(bench.pid_of("client"), signal.SIGKILL)
        assert job.wait(30) == 1
    finally:
        end(job)
    assert bench.failure().failure_class == FailureClass.CLIENT_FAILED
    assert "left no summary" in bench.failure().message
    assert len(bench.records()) >= 5


def test_client_without_a_summary_and_exit_0(bench):
    assert bench.with_plan(client_env={"CLIENT_MODE": "no-summary"}).run() == 1
    assert bench.failure().failure_class == FailureClass.CLIENT_FAILED


def test_client_that_does_not_end(bench, monkeypatch):
    monkeypatch.setattr(runs, "SUMMARY_S", 1.0)
    hanging = bench.with_plan(client_env={"CLIENT_MODE": "hang"})
    assert hanging.with_replay(warmup_grace_s=0.5, grace_s=0.5, duration_s=1.0).run() == 1
    assert bench.failure().failure_class == FailureClass.OUT_OF_TIME
    assert bench.records()


def test_torn_records_are_published_as_they_are(bench):
    assert bench.with_plan(client_env={"CLIENT_MODE": "tear"}).run() == 0
    assert bench.records()[-1] == '{"metadata": {"benchm'
    assert bench.published().client_exit_code == 0


def test_requests_for_a_model_that_is_not_there_end_the_replay(bench):
    wrong = bench.engine("--good", "12", "--then", "refuse").with_replay(duration_s=60.0)
    assert wrong.run() == 1
    failure = bench.failure()
    assert failure.seen_as == FailureClass.ERROR_STORM
    assert "404" in failure.message


def test_full_disk(bench, monkeypatch, capsys):
    def full(path, _data):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(watch, "append_gzip", full)
    assert bench.with_replay(duration_s=60.0).run() == 1
    failure = bench.failure()
    assert failure.failure_class == FailureClass.OUTPUT_NOT_WRITTEN
    assert "No space left" in failure.message
    assert not failure.worth_retrying
    assert "Traceback" not in capsys.readouterr().err


def test_clock_that_jumps(bench, monkeypatch):
    real, begin = time.time, time.monotonic()

    def jumping():
        return real() + (3600.0 if time.monotonic() - begin > 4.0 else 0.0)

    monkeypatch.setattr(watch.time, "time", jumping)
    assert bench.with_replay(duration_s=6.0).run() == 0
    (found,) = bench.published().findings
    assert found.code == Reason.CLOCK_JUMP
    assert "+3600.0 s" in found.detail


def test_a_defect_of_our_own_is_recorded_as_unknown_and_leaves_nothing(bench, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("made up")

    monkeypatch.setattr(runs, "scrape", broken)
    with pytest.raises(ZeroDivisionError):
        bench.run()
    assert bench.failure().failure_class == FailureClass.UNKNOWN
    assert not bench.left()
