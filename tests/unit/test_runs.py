"""What a run is made of beside its processes, which tests/faults/ covers."""

import re
import threading
from pathlib import Path

import pytest

from tests.unit.arms import plan
from workflow import images, runs
from workflow.attempt import Attempt, Interrupted, how_it_ended
from workflow.config import Cluster
from workflow.contract import InputError, Reason, file_sha256
from workflow.failures import AttemptFailed, FailureClass
from workflow.launchers import Launcher
from workflow.serving import Blocker, Proof


class Stub:
    """As much of a point as proofs look at."""

    def __init__(self, arm, serve_plan):
        self.arm, self.plan, self.id = arm, serve_plan, "p"


@pytest.fixture
def attempt(tmp_path):
    made = Attempt(
        point=Stub("some-backend", plan("dsv4-b200-vllm", "none")),
        name="a",
        folder=tmp_path,
        parts=None,
        launcher=Launcher(Cluster(launcher="bare"), None, "none"),
        parent=None,
        stopping=threading.Event(),
    )
    (tmp_path / "engine.log").write_text("")
    return made


def with_proof(attempt, pattern, expected=True):
    proof = Proof(name="p", service="engine", pattern=pattern, expected=expected, says="it is on")
    attempt.point.plan = attempt.point.plan.model_copy(update={"proofs": (proof,)})


def log(attempt, text):
    with attempt.log_of("engine").open("a") as stream:
        stream.write(text)


def test_a_proof_that_is_seen_holds(attempt):
    with_proof(attempt, r"offload \d+ GB")
    log(attempt, "x\noffload 3 GB\n")
    assert runs.proofs_of(attempt) == ({"p": True}, ())


@pytest.mark.parametrize(
    ("arm", "code"), [("some-backend", Reason.OFFLOAD_NOT_PROVEN), ("none", Reason.OFFLOAD_IN_CONTROL)]
)
def test_a_proof_that_does_not_hold_is_a_finding(attempt, arm, code):
    attempt.point.arm = arm
    with_proof(attempt, "offload", expected=arm != "none")
    log(attempt, "nothing\n" if arm != "none" else "offload is on\n")
    _, (finding,) = runs.proofs_of(attempt)
    assert finding.code == code


def test_what_our_own_probe_prompts_cause_proves_nothing(attempt):
    with_proof(attempt, "restored")
    attempt.point.plan = attempt.point.plan.model_copy(update={"sidecars": ()})
    log(attempt, "start\n")
    with runs._own_lines(attempt):
        log(attempt, "restored a probe\n")
    log(attempt, "replay\n")
    with runs._own_lines(attempt):
        log(attempt, "restored a probe\n")
    assert list(attempt.proof_lines("engine")) == ["start", "replay"]
    assert runs.proofs_of(attempt)[0] == {"p": False}
    log(attempt, "restored a session\n")
    assert runs.proofs_of(attempt)[0] == {"p": True}


def test_artefacts_are_read_back(tmp_path):
    (tmp_path / "client").mkdir()
    (tmp_path / "client/a.json").write_text("{}")
    (tmp_path / "b.log").write_text("")
    found = runs.artefacts_of(tmp_path)
    assert [artefact.path for artefact in found] == ["b.log", "client/a.json"]
    assert found[1].sha256 == file_sha256(tmp_path / "client/a.json")
    assert found[1].bytes == 2


def test_the_name_of_an_attempt_holds_its_job(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    assert runs.attempt_name().startswith("job77-")
    monkeypatch.delenv("SLURM_JOB_ID")
    assert re.fullmatch(r"\d{8}T\d{6}-\d+", runs.attempt_name())


def test_the_host_is_described():
    host = runs.host_facts()
    assert host.cores > 0
    assert host.memory_bytes > 0
    assert host.cpu


def test_a_parent_that_is_gone_ends_the_attempt(attempt):
    attempt.check_parent()
    attempt.parent = 1 << 22
    with pytest.raises(Interrupted, match="is gone"):
        attempt.check_parent()


def test_how_a_process_ended():
    assert how_it_ended(-9) == "was killed by signal 9"
    assert how_it_ended(3) == "ended with code 3"


def test_a_blocked_plan_is_not_started(attempt, monkeypatch):
    blocked = (Blocker(code="x", says="known not to run"),)
    attempt.point.plan = attempt.point.plan.model_copy(update={"blocked_by": blocked})
    monkeypatch.setattr(runs.startup, "check_node", lambda _: pytest.fail("looked at the node"))
    with pytest.raises(AttemptFailed, match="known not to run") as failed:
        runs.measure(attempt)
    assert failed.value.failure_class == FailureClass.CONFIGURATION


def test_a_runner_that_is_not_listed_is_named(tmp_path):
    file = tmp_path / "clusters.yaml"
    file.write_text("clusters:\n  cluster:here:\n    launcher: bare\n")

    class Elsewhere:
        class row:  # noqa: N801
            runner = "cluster:there"

    with pytest.raises(InputError, match=r"cluster:there.*allowed: cluster:here"):
        images.cluster_of(Elsewhere, file)
    Elsewhere.row.runner = "cluster:here"
    assert images.cluster_of(Elsewhere, file).launcher == "bare"


def test_saying_something_survives_a_full_disk_and_a_closed_terminal(attempt, monkeypatch):
    attempt.log = Path("/dev/full")
    monkeypatch.setattr(runs.sys, "stderr", Path("/dev/full").open("w"))  # noqa: SIM115
    attempt.say("x")


def test_the_command_line_refuses_a_point_that_is_none(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(runs.sys, "argv", ["runs", str(tmp_path / "none.json"), str(tmp_path)])
    assert runs.main() == 2
    assert "no such file" in capsys.readouterr().err
