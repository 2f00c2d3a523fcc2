"""Servers that break: each fault gets its class, leaves nothing behind and costs nothing that was measured."""

import os
import signal
import socket

import pytest

from tests.end_to_end.conftest import wait_for
from tests.faults.conftest import end
from workflow import leftovers, processes, runs, startup
from workflow.contract import Reason
from workflow.failures import FailureClass
from workflow.integrity import Integrity


def test_a_sound_point_is_measured(bench):
    assert bench.run() == 0
    run = bench.published()
    assert run.findings == ()
    assert "0 of 4 answers changed" in run.integrity
    assert {artefact.path for artefact in run.artefacts} >= {"node.jsonl", "metrics/engine.samples.prom.gz"}


def test_server_killed_in_load(bench):
    job = bench.engine("--load", "never", deadline_s=60.0).start()
    try:
        wait_for(lambda: bench.out.is_dir() and bench.attempts and "loading" in bench.log("engine.log"), 30, "the load")
        os.kill(bench.pid_of("engine"), signal.SIGKILL)
        assert job.wait(20) == 1
    finally:
        end(job)
    assert bench.failure().failure_class == FailureClass.ENGINE_DIED
    assert "killed by signal 9" in bench.failure().message


def test_server_that_dies_in_load_is_named_by_its_first_traceback_and_not_tried_again(bench, capsys):
    broken = bench.engine("--load", "die")
    assert broken.run() == 1
    failure = bench.failure()
    assert failure.failure_class == FailureClass.CONFIGURATION
    assert failure.seen_as == FailureClass.ENGINE_DIED
    assert failure.first_cause == "RuntimeError: Pin budget: 0 tokens (ratio=0.000)"
    assert not failure.worth_retrying
    attempts = len(bench.attempts)
    assert broken.run(tries=2) == 1
    assert "not tried again" in capsys.readouterr().err
    assert len(bench.attempts) == attempts


def test_server_that_never_gets_ready(bench):
    assert bench.engine("--load", "never", deadline_s=2.0).run() == 1
    failure = bench.failure()
    assert failure.failure_class == FailureClass.ENGINE_NOT_READY
    assert "its last line: loading" in failure.message


def test_server_that_is_ready_and_gives_no_token(bench):
    assert bench.engine("--load", "no-token").run() == 1
    assert bench.failure().failure_class == FailureClass.ENGINE_NOT_READY
    assert "without a token" in bench.failure().message


def test_server_of_another_model(bench):
    other = bench.with_plan(served_model_name="another")
    assert other.run() == 1
    assert bench.failure().failure_class == FailureClass.CONFIGURATION
    assert "tiny-llama" in bench.failure().message


def test_server_killed_in_replay(bench):
    job = bench.with_replay(duration_s=60.0).start()
    try:
        bench.wait_for_records(5)
        os.kill(bench.pid_of("engine"), signal.SIGKILL)
        assert job.wait(30) == 1
    finally:
        end(job)
    assert bench.failure().failure_class == FailureClass.ENGINE_DIED
    assert len(bench.records()) >= 5
    assert not (bench.out / "run.json").exists()


def test_the_server_is_blamed_and_not_the_client_that_saw_it_die(bench):
    assert bench.engine("--good", "12", "--then", "die").run() == 1
    failure = bench.failure()
    assert failure.failure_class == FailureClass.ENGINE_BUG
    assert failure.first_cause == "AssertionError: popleft_n of an empty queue"


def test_server_that_answers_health_and_never_a_token(bench):
    stalled = bench.engine("--good", "12", "--then", "hang").with_replay(request_timeout_s=3.0, duration_s=60.0)
    assert stalled.run() == 1
    failure = bench.failure()
    assert failure.failure_class == FailureClass.STALLED
    assert "the server is stalled: 1 requests and" in failure.message
    assert "engine.py" in bench.log("evidence/processes.txt")
    assert len(bench.records()) >= 3


def test_error_storm(bench):
    assert bench.engine("--good", "12", "--then", "fail").with_replay(duration_s=60.0).run() == 1
    failure = bench.failure()
    assert failure.failure_class == FailureClass.ERROR_STORM
    assert failure.worth_retrying
    assert "500" in failure.message


def test_the_server_is_blamed_by_a_client_that_ends_with_it(bench):
    dying = bench.engine("--good", "12", "--then", "vanish").with_plan(client_env={"CLIENT_MODE": "quit"})
    assert dying.run() == 1
    assert bench.failure().failure_class == FailureClass.ENGINE_DIED


def test_server_killed_by_the_kernel_for_memory(bench, monkeypatch):
    counts = iter([3, 4])
    monkeypatch.setattr(runs, "oom_kills", lambda: next(counts))
    assert bench.engine("--good", "12", "--then", "vanish").run() == 1
    failure = bench.failure()
    assert failure.failure_class == FailureClass.OUT_OF_MEMORY
    assert "killed by signal 9; the kernel killed 1 processes" in failure.message


def test_sidecar_killed(bench):
    job = bench.sidecar().with_replay(duration_s=60.0).start()
    try:
        bench.wait_for_records(5)
        os.kill(bench.pid_of("store"), signal.SIGKILL)
        assert job.wait(30) == 1
    finally:
        end(job)
    assert bench.failure().failure_class == FailureClass.SIDECAR_DIED
    assert bench.failure().message.startswith("store was killed")


def test_port_taken_by_a_stranger(bench, monkeypatch):
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        taken = stranger.getsockname()[1]
        monkeypatch.setattr(processes, "free_ports", lambda names: dict.fromkeys(names, taken))
        assert bench.engine(deadline_s=3.0).run() == 1
    failure = bench.failure()
    assert failure.failure_class == FailureClass.NODE_UNFIT
    assert "Address already in use" in (failure.first_cause or "")


def test_a_strangers_server_is_not_taken_for_ours(bench, monkeypatch, project):
    ports = processes.free_ports(("engine",))
    script = project / "tests/faults/engine.py"
    argv = (processes.sys.executable, str(script), "--port", str(ports["engine"]), "--name", bench.served)
    stranger = processes.start("stranger", argv, {}, bench.root / "stranger.log", "another-attempt")
    try:
        assert processes.wait_until(lambda: processes.listener(ports["engine"]) is not None, 20)
        monkeypatch.setattr(processes, "free_ports", lambda _: ports)
        # An engine that does not notice: it listens elsewhere.
        quiet = bench.engine("--port", "0", deadline_s=2.0)
        assert quiet.run() == 1
        assert stranger.alive
    finally:
        processes.stop(stranger, 2.0)
    assert bench.failure().failure_class == FailureClass.ENGINE_NOT_READY
    assert "is taken by process" in bench.failure().message


def test_answers_that_change_make_the_run_invalid(bench):
    assert bench.engine("--good", "15", "--then", "nonsense").run() == 0
    run = bench.published()
    assert [finding.code for finding in run.findings] == [Reason.KV_INTEGRITY]
    seen = Integrity.read(bench.attempts[-1] / "integrity.json")
    assert seen.changed == (0, 1, 2, 3)


@pytest.mark.parametrize("deaf", [(), ("--deaf",)], ids=["polite", "deaf"])
def test_children_that_leave_the_group_and_shared_memory_are_cleaned_up(bench, deaf):
    name = f"vllm_offload_{os.getpid()}.mmap"
    assert bench.engine("--child", "--shm", name, *deaf).run() == 0
    assert any(name in line for line in bench.published().left_behind)
    assert not (leftovers.SHM / name).exists()


def test_shared_memory_of_others_is_reported_and_left_alone(bench):
    path = leftovers.SHM / f"vllm_offload_{os.getpid()}.mmap"
    path.write_bytes(b"x")
    try:
        assert bench.run() == 0
        assert any(path.name in warning for warning in bench.published().preflight)
        (bench.out / "run.json").unlink()
        with path.open():  # a live process has it open: a neighbour, and no leftover
            job = bench.start()
            try:
                assert job.wait(60) == 0
            finally:
                end(job)
        assert not any(path.name in warning for warning in bench.published().preflight)
        assert path.exists()
    finally:
        path.unlink()


def test_a_node_whose_gpus_are_in_use_is_unfit_and_another_one_may_do(bench, monkeypatch):
    monkeypatch.setattr(startup, "gpu_memory_used_shares", lambda: [0.0, 0.6])
    assert bench.run() == 1
    failure = bench.failure()
    assert failure.failure_class == FailureClass.NODE_UNFIT
    assert failure.worth_retrying
    assert "60% of a GPU in use" in failure.message


def test_checkpoint_without_a_shard_is_refused_before_anything_is_started(bench):
    checkpoint = bench.root / "checkpoint"
    (checkpoint / "model.safetensors.index.json").write_text('{"weight_map": {"a": "1.safetensors"}}')
    assert bench.run() == 1
    assert bench.failure().failure_class == FailureClass.CONFIGURATION
    assert "checkpoint_incomplete" in bench.failure().message
    assert not (bench.attempts[-1] / "engine.log").exists()
