"""The replay client's command, and what its files say whatever its exit code says."""

import json
from pathlib import Path

import pytest

from workflow.config import Replay
from workflow.contract import InputError
from workflow.replay import (
    RECORDS,
    SUMMARY,
    Progress,
    ReplayPaths,
    command,
    corpus,
    environment_variables,
    outcome,
    progress,
)
from workflow.serving import flags_of

PATHS = ReplayPaths(Path("/env"), Path("/sessions"), Path("/hf"), Path("/cache"), Path("/out"))


def argv(**change):
    return command(Replay(**change), 8, "served", "org/model", "http://127.0.0.1:9", PATHS)


def test_every_field_of_the_replay_reaches_the_client():
    """DESIGN: declared is what runs. A field that changes nothing in the command would change ids and not numbers."""
    changed = {
        "scenario": "another",
        "duration_s": 61.0,
        "grace_s": 7.0,
        "warmup_grace_s": 11.0,
        "request_timeout_s": 13.0,
        "random_seed": 7,
        "start_ratio_min": 0.1,
        "start_ratio_max": 0.9,
        "stop_above_error_share": 0.5,
        "workers": 3,
        "client": "agentx-harness",
        "warmup_requests_per_lane": 3,
        "idle_gap_cap_s": 60.0,
    }
    elsewhere = {"client_version", "trace_set"}
    assert set(Replay.model_fields) == {*changed, *elsewhere}
    for name, value in changed.items():
        assert argv(**{name: value}) != argv(), name


def test_the_command():
    flags = flags_of(argv(duration_s=900.0)[2:])
    assert argv()[:2] == ("/env/bin/aiperf", "profile")
    assert flags["--url"] == ("http://127.0.0.1:9",)
    assert flags["--model"] == ("served",)
    assert flags["--tokenizer"] == ("org/model",)
    assert flags["--concurrency"] == ("8",)
    assert flags["--benchmark-duration"] == ("900",)
    assert flags["--input-file"] == ("/sessions",)
    assert flags["--output-artifact-dir"] == ("/out",)
    assert flags["--extra-inputs"] == ("ignore_eos:true",)


def test_the_command_of_the_fork():
    """The flags are those that agentx 1.0.12 took in a replay; its `aiperf` beside it names another version."""
    fork = argv(client="agentx-harness", warmup_requests_per_lane=10, idle_gap_cap_s=300.0)
    assert fork[:2] == ("/env/bin/agentx", "profile")
    own = {"--warmup-requests-per-lane": ("10",), "--trace-idle-gap-cap-seconds": ("300",)}
    assert flags_of(fork[2:]) == {**flags_of(argv()[2:]), **own}


def test_the_client_has_no_network():
    assert environment_variables(PATHS) == {
        "HF_HOME": "/hf",
        "HF_HUB_OFFLINE": "1",
        "AIPERF_DATASET_MMAP_CACHE_DIR": "/cache",
    }


def test_corpus(tmp_path):
    with pytest.raises(InputError, match="corpus is not in its environment"):
        corpus(tmp_path)
    path = tmp_path / "lib/python3.11/site-packages/aiperf/dataset/generator/assets/shakespeare.txt"
    path.parent.mkdir(parents=True)
    path.write_text("x")
    assert corpus(tmp_path) == path


def test_progress_follows_the_log(tmp_path):
    log = tmp_path / "client.log"
    assert progress(log, tmp_path) == Progress("preparing", 0)
    seen = []
    for line in (
        "Starting AIPerf System",
        "Credit phase start: warmup (x)",
        "Credit phase start: profiling (x)",
        "Waiting for event 'profiling phase credits returned'",
        "Processing records results",
    ):
        with log.open("a") as stream:
            stream.write(line + "\n")
        seen.append(progress(log, tmp_path).phase)
    assert seen == ["preparing", "warm-up", "profiling", "draining", "summarising"]
    (tmp_path / RECORDS).write_text("{}\n{}\n")
    assert progress(log, tmp_path).requests == 2


@pytest.mark.parametrize(
    ("summary", "problem"),
    [
        (None, "ended with code 0 and left no summary"),
        ('{"request_count": {"avg": 3', "cannot be read"),
        ("{}", "without one successful request"),
        ('{"request_count": {"avg": 0}}', "without one successful request"),
        ('{"request_count": null}', "without one successful request"),
        ('{"request_count": {"avg": 12}}', None),
        ('{"request_count": {"avg": 12}, "was_cancelled": true}', None),
    ],
)
def test_the_summary_counts_and_not_the_exit_code(tmp_path, summary, problem):
    log = tmp_path / "client.log"
    log.write_text("".join(f"line {i}\n" for i in range(40)))
    if summary is not None:
        (tmp_path / SUMMARY).write_text(summary)
    found = outcome(0, log, tmp_path)
    assert (found.problem is None) == (problem is None)
    assert problem is None or problem in found.problem
    assert found.log_tail[-1] == "line 39"
    assert len(found.log_tail) == 12


def test_a_client_that_failed_late_but_measured_is_believed(tmp_path):
    (tmp_path / SUMMARY).write_text(json.dumps({"request_count": {"avg": 5}}))
    assert outcome(1, tmp_path / "none.log", tmp_path).problem is None
