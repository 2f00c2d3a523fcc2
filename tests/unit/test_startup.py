"""What a node says about its GPUs, and which versions are read back from logs."""

import os
import threading

import pytest

from tests.unit.arms import plan
from workflow import startup
from workflow.attempt import Attempt
from workflow.config import Cluster
from workflow.failures import AttemptFailed, FailureClass
from workflow.launchers import Launcher
from workflow.preflight import RULES
from workflow.serving import VersionProbe


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Return a function that puts an nvidia-smi with a given output in the path."""

    def put(output, code=0):
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\nprintf '{output}'\nexit {code}\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return put


def test_memory_in_use_on_each_gpu(smi):
    smi(r"0, 143771\n71885, 143770\n")
    assert startup.gpu_memory_used_shares() == [0.0, 0.5]


@pytest.mark.parametrize(("output", "code"), [("", 9), ("No devices were found", 6), (r"[N/A], [N/A]\n", 0)])
def test_a_tool_that_cannot_tell_says_nothing(smi, output, code):
    smi(output, code)
    assert startup.gpu_memory_used_shares() == []


def test_the_jobs_own_gpus_are_asked(smi, monkeypatch):
    smi("")
    assert len(startup.nvidia_smi()) == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert startup.nvidia_smi()[1] == "--id=2,3"


class Stub:
    def __init__(self, serve_plan):
        self.plan, self.id, self.arm = serve_plan, "p", "none"


def versions(tmp_path, log, declared):
    (tmp_path / "engine.log").write_text(log)
    probe = VersionProbe(component="vllm", service="engine", pattern=r"version (?P<version>\S+)", declared=declared)
    made = plan("dsv4-b200-vllm", "none").model_copy(update={"versions": (probe,)})
    launcher = Launcher(Cluster(launcher="bare"), None, "none")
    return startup.versions_of(Attempt(Stub(made), "a", tmp_path, None, launcher, None, threading.Event()))


def test_the_version_that_serves_is_read_back(tmp_path):
    assert versions(tmp_path, "x\nversion 1.2\nversion 9\n", "1.2") == {"vllm": "1.2"}
    assert versions(tmp_path, "x\n", None) == {"vllm": None}


def test_the_label_of_a_build_counts_only_if_it_is_declared(tmp_path):
    assert versions(tmp_path, "version 1.2+cpu\n", "1.2") == {"vllm": "1.2+cpu"}
    assert versions(tmp_path, "version 1.2+cpu\n", "1.2+cpu") == {"vllm": "1.2+cpu"}
    for log in ("version 1.2\n", "version 1.2+cu130\n", "version 1.2.1+cpu\n"):
        with pytest.raises(AttemptFailed):
            versions(tmp_path, log, "1.2+cpu")


@pytest.mark.parametrize(("log", "says"), [("version 1.3\n", "1.3 serves, 1.2"), ("x\n", r"\? serves, 1.2")])
def test_another_version_is_not_measured(tmp_path, log, says):
    with pytest.raises(AttemptFailed, match=says) as failed:
        versions(tmp_path, log, "1.2")
    assert failed.value.failure_class == FailureClass.VERSION_MISMATCH


def test_rules_about_the_state_of_a_node_exist():
    assert {RULES[code].severity for code in startup.OF_THIS_NODE} == {"error"}


def test_a_service_finds_the_programs_of_its_environment_first(tmp_path, monkeypatch):
    # versioned.py becomes `vllm`, which it looks for by name: without the folder there is none, or another one.
    monkeypatch.setenv("PATH", "/usr/bin")
    argv, env = startup.in_environment(("python3", "-c", "x"), {"A": "1"}, tmp_path)
    assert argv == (f"{tmp_path}/bin/python3", "-c", "x")
    assert env == {"A": "1", "PATH": f"{tmp_path}/bin:/usr/bin"}
    assert startup.in_environment(("x",), {"PATH": "/own"}, tmp_path)[1]["PATH"] == f"{tmp_path}/bin:/own"


def test_V10_a_start_that_hangs_is_told_with_the_phase_that_it_hangs_in(tmp_path):
    log = tmp_path / "engine.log"
    log.write_text("INFO weights loaded in 4.2 s\nCapturing CUDA graphs (FULL): 40%|####      | 2/5\n\n")
    assert startup._last_words(log) == "; its last line: Capturing CUDA graphs (FULL): 40%|####      | 2/5"
    log.write_text("")
    assert startup._last_words(log) == "; it said nothing"
