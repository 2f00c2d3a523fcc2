"""One holder of a point at a time; a dead holder holds nothing."""

import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from workflow import lease as module
from workflow.failures import AttemptFailed, FailureClass
from workflow.lease import Lease, lease, live_lease


def foreign(out, age_s=0.0, stopping=False):
    """Leave the lease of a job on another host, renewed `age_s` seconds ago."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "lease.json"
    found = Lease(attempt="job7-x", host="another-host", pid=1, born="x", stopping=stopping)
    path.write_text(found.model_dump_json())
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def local(out, pid, born):
    out.mkdir(parents=True, exist_ok=True)
    found = Lease(attempt="old", host=socket.gethostname(), pid=pid, born=born, stopping=False)
    (out / "lease.json").write_text(found.model_dump_json())


def test_a_point_is_held_once_and_given_back(tmp_path):
    with lease(tmp_path, "first"):
        assert live_lease(tmp_path).attempt == "first"
        with pytest.raises(AttemptFailed, match="attempt first") as failed, lease(tmp_path, "second"):
            raise AssertionError("two hold one point")
        assert failed.value.failure_class == FailureClass.ALREADY_RUNNING
        assert live_lease(tmp_path).attempt == "first"
    assert live_lease(tmp_path) is None
    assert not list(tmp_path.iterdir())


def test_a_live_job_on_another_host_is_named(tmp_path):
    foreign(tmp_path)
    with pytest.raises(AttemptFailed, match=r"job7-x \(pid 1 on another-host\)"), lease(tmp_path, "mine"):
        pass


def test_a_job_on_another_host_that_no_longer_beats_is_taken_over(tmp_path):
    foreign(tmp_path, age_s=module.LEASE_EXPIRES_S + 5)
    with lease(tmp_path, "mine"):
        assert live_lease(tmp_path).attempt == "mine"


def test_a_clock_that_differs_from_the_file_systems_does_not_end_a_live_lease(tmp_path, monkeypatch):
    foreign(tmp_path)
    real = time.time
    monkeypatch.setattr(module.time, "time", lambda: real() + 3600)
    with pytest.raises(AttemptFailed), lease(tmp_path, "mine"):
        pass


def test_a_wall_clock_that_jumps_does_not_end_the_lease_of_a_local_process(tmp_path, monkeypatch):
    with lease(tmp_path, "first"):
        real = time.time
        monkeypatch.setattr(module.time, "time", lambda: real() + 86400)
        assert live_lease(tmp_path).attempt == "first"


def test_a_dead_process_and_a_reused_pid_hold_nothing(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    born = module._born(ended.pid)
    ended.wait()
    local(tmp_path, ended.pid, born or "")
    assert live_lease(tmp_path) is None
    local(tmp_path, os.getpid(), "another boot:1")
    assert live_lease(tmp_path) is None
    with lease(tmp_path, "mine"):
        assert live_lease(tmp_path).attempt == "mine"


def test_a_zombie_holds_nothing(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    local(tmp_path, child.pid, module._born(child.pid))
    assert live_lease(tmp_path) is not None
    child.stdin.close()
    deadline = time.monotonic() + 20
    while live_lease(tmp_path) is not None:  # not reaped yet: it is a zombie now
        assert time.monotonic() < deadline
        time.sleep(0.05)
    child.wait()


def test_a_torn_lease_holds_nothing(tmp_path):
    (tmp_path / "lease.json").write_text('{"attempt": "x')
    with lease(tmp_path, "mine"):
        assert live_lease(tmp_path).attempt == "mine"


def test_a_holder_that_stops_is_waited_for(tmp_path):
    path = foreign(tmp_path, stopping=True)
    threading.Timer(0.5, path.unlink).start()
    with lease(tmp_path, "mine"):
        assert live_lease(tmp_path).attempt == "mine"


def test_the_beat_outlives_a_full_disk(tmp_path, monkeypatch):
    beats = []

    def full(path):
        beats.append(path)
        if len(beats) == 1:
            raise OSError("No space left on device")

    monkeypatch.setattr(module, "BEAT_S", 0.1)
    monkeypatch.setattr(module.os, "utime", full)
    with lease(tmp_path, "mine"):
        deadline = time.monotonic() + 20
        while len(beats) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_the_lease_says_when_its_holder_is_stopping(tmp_path):
    with lease(tmp_path, "mine") as stopping:
        assert not live_lease(tmp_path).stopping
        stopping.set()
        deadline = time.monotonic() + 20
        while not live_lease(tmp_path).stopping:
            assert time.monotonic() < deadline
            time.sleep(0.05)
