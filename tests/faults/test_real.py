"""Faults with the real engine and the real replay client: what aiperf leaves differs from what its exit code says."""

import os
import signal
import subprocess

import pytest
import yaml

from tests.end_to_end.conftest import wait_for
from tests.faults.conftest import end
from workflow import scratch
from workflow.config import Limits
from workflow.contract import Reason
from workflow.failures import FailureClass
from workflow.measured import measure_run


def judged(bench):
    """Return the metrics of a published run."""
    file = bench.root / "point.json"
    bench.point.write(file)
    return measure_run(file, bench.out / "run.json", Limits()).metrics


def codes(metrics):
    return {finding.code for finding in metrics.findings}


@pytest.mark.parametrize(("moment", "records"), [("warm-up", 0), ("replay", 6)])
def test_engine_killed(real, moment, records):
    job = real.with_replay(duration_s=60.0).start()
    try:
        if records:
            real.wait_for_records(records)
        else:
            real.wait_for_client_line("Credit phase start: warmup")
        os.kill(real.pid_of("engine"), signal.SIGKILL)
        assert job.wait(60) == 1
    finally:
        end(job)
    assert real.failure().failure_class == FailureClass.ENGINE_DIED, moment
    assert len(real.records()) >= records
    assert not (real.out / "run.json").exists()


def test_client_killed(real):
    job = real.with_replay(duration_s=60.0).start()
    try:
        real.wait_for_records(4)
        os.kill(real.pid_of("client"), signal.SIGKILL)
        assert job.wait(60) == 1
    finally:
        end(job)
    assert real.failure().failure_class == FailureClass.CLIENT_FAILED
    assert len(real.records()) >= 4


def test_sigkill_of_the_job_with_a_client_that_renames_itself(real):
    job = real.with_replay(duration_s=120.0).start()
    try:
        real.wait_for_records(4)
        assert len(real.left()) > 5
        job.kill()
        job.wait()
    finally:
        end(job)
    wait_for(lambda: not real.left(), 15, f"the guard's sweep of {real.left()}")
    assert len(real.records()) >= 4
    (real.out / "lease.json").unlink()  # a rerun takes it over, see test_job.py


def test_a_third_of_the_requests_fails_and_the_client_says_all_is_well(real):
    failing = real.engine("--good", "25", "--then", "fail-some").with_replay(duration_s=8.0, stop_above_error_share=1.0)
    assert failing.run() == 0
    run = failing.published()
    assert run.client_exit_code == 0
    metrics = judged(failing)
    assert metrics.status == "invalid"
    assert Reason.ERROR_SHARE in codes(metrics)


def test_the_clients_own_threshold_ends_the_replay_and_the_client_says_all_is_well(real):
    failing = real.engine("--good", "25", "--then", "fail-some").with_replay(duration_s=60.0)
    assert failing.run() == 0
    assert failing.published().phases_s["replay"] < 60.0
    metrics = judged(failing)
    assert metrics.status == "invalid"
    assert Reason.CLIENT_CANCELLED in codes(metrics)


@pytest.fixture
def small_disk(tmp_path):
    """Return a folder on a file system of 200 kB; only a privileged user can make one."""
    folder = tmp_path / "small"
    folder.mkdir()
    argv = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(folder)]
    if subprocess.run(argv, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_file_tier_that_fills_its_disk(bench, small_disk, monkeypatch):
    monkeypatch.setattr(scratch, "RESERVE_BYTES", 50_000)
    clusters = yaml.safe_load(bench.clusters.read_text())
    clusters["clusters"]["cluster:local"]["scratch"] = str(small_disk)
    bench.clusters.write_text(yaml.safe_dump(clusters))
    filling = bench.engine("--fill", "<path:kv-tier>").with_plan(scratch=("kv-tier",)).with_replay(duration_s=120.0)
    assert filling.run() == 1
    failure = bench.failure()
    assert failure.failure_class == FailureClass.SCRATCH_FULL
    assert not failure.worth_retrying
    assert str(small_disk) in failure.message
    assert "name a larger disk as the cluster's `scratch`" in failure.message
    assert bench.records(), "what was measured before the disk was full"
    assert list(small_disk.iterdir()) == [], "the next attempt finds the disk empty"


def test_disk_that_fills_up_in_the_replay(bench, small_disk):
    bench.out.parent.mkdir(parents=True)
    bench.out.symlink_to(small_disk)
    assert bench.with_replay(duration_s=120.0).run() == 1
    failure = bench.failure()
    # Whoever meets the full disk first: our sampler, or the client that cannot write its records.
    assert failure.failure_class in (FailureClass.OUTPUT_NOT_WRITTEN, FailureClass.CLIENT_FAILED)
    assert not (bench.out / "run.json").exists()
    assert bench.records(), "what was measured before the disk was full"
