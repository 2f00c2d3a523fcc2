"""What Slurm's answers mean. The texts are Slurm's own: 22.05 where they were seen, its source for the others."""

from pathlib import Path

import pytest

from workflow.contract import InputError
from workflow.failures import WORTH_RETRYING, FailureClass
from workflow.jobs import (
    Answer,
    Job,
    cancelled_by_us,
    cause_of,
    ended,
    newest_by_point,
    parse_sacct,
    parse_squeue,
    queue,
    refused,
)

TIME_LIMIT = "slurmstepd: error: *** STEP 3.0 ON vm CANCELLED AT 2026-12-01T06:42:59 DUE TO TIME LIMIT ***"
MEMORY = "slurmstepd: error: Step 4.0 exceeded memory limit (1500000 > 716800), being killed"
CGROUP_MEMORY = (
    "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed."
)
CANCELLED = "slurmstepd: error: *** JOB 1 ON vm CANCELLED AT 2026-12-01T06:41:55 ***"
PREEMPTED = "slurmstepd: error: *** JOB 9 ON n1 CANCELLED AT 2026-12-01T06:41:55 DUE TO PREEMPTION ***"
NODE = "slurmstepd: error: *** JOB 9 ON n1 CANCELLED AT 2026-12-01T06:41:55 DUE TO NODE FAILURE, SEE SLURMCTLD LOG ***"


def job(state, **more):
    return Job("12", "p", state, nodes="n1", **more)


@pytest.mark.parametrize(
    ("state", "log", "expected"),
    [
        pytest.param("TIMEOUT", "", FailureClass.TIME_LIMIT, id="time-out"),
        pytest.param("UNKNOWN", TIME_LIMIT, FailureClass.TIME_LIMIT, id="time-out, known from the log only"),
        pytest.param("DEADLINE", "", FailureClass.TIME_LIMIT, id="deadline"),
        pytest.param("OUT_OF_MEMORY", "", FailureClass.OUT_OF_MEMORY, id="S19 state"),
        pytest.param("FAILED", MEMORY, FailureClass.OUT_OF_MEMORY, id="S19 killed without cgroups: FAILED"),
        pytest.param("CANCELLED", MEMORY + "\n" + CANCELLED, FailureClass.OUT_OF_MEMORY, id="S19 shown as cancelled"),
        pytest.param("FAILED", CGROUP_MEMORY, FailureClass.OUT_OF_MEMORY, id="S19 control group"),
        pytest.param("CANCELLED", CANCELLED, FailureClass.CANCELLED, id="scancel"),
        pytest.param("UNKNOWN", CANCELLED, FailureClass.CANCELLED, id="scancel, forgotten by squeue"),
        pytest.param("NODE_FAIL", "", FailureClass.NODE_FAILURE, id="node"),
        pytest.param("UNKNOWN", NODE, FailureClass.NODE_FAILURE, id="node, known from the log only"),
        pytest.param("BOOT_FAIL", "", FailureClass.NODE_FAILURE, id="boot"),
        pytest.param("PREEMPTED", "", FailureClass.PREEMPTED, id="preempted"),
        pytest.param("UNKNOWN", PREEMPTED, FailureClass.PREEMPTED, id="preempted, known from the log only"),
        pytest.param("FAILED", "pyxis: failed to import docker image", FailureClass.IMAGE_PULL, id="pyxis"),
        pytest.param(
            "FAILED", "docker: Error response from daemon: pull access denied", FailureClass.IMAGE_PULL, id="docker"
        ),
        pytest.param("FAILED", "toomanyrequests: rate limit", FailureClass.IMAGE_PULL, id="registry limit"),
    ],
)
def test_each_end_has_its_class(state, log, expected):
    found = cause_of(job(state), log)
    assert found is not None
    assert found.failure_class == expected
    assert "Slurm job 12" in found.message


def test_a_node_that_is_lost_while_it_starts_a_job():
    cause = cause_of(job("FAILED", reason="JobLaunchFailure"), "")
    assert cause.failure_class == FailureClass.NODE_FAILURE


@pytest.mark.parametrize(("state", "log"), [("COMPLETED", CANCELLED), ("FAILED", "Error in rule"), ("UNKNOWN", "")])
def test_a_job_that_ended_by_itself_is_left_to_its_own_record(state, log):
    assert cause_of(job(state), log) is None


def test_x23_cancelled_by_another_user():
    """A job that another run's `scancel --name` ended looked like a crash of the server."""
    found = parse_sacct("12|CANCELLED by 1001|None|n1\n", [Job("12", "p", "UNKNOWN")])[0]
    assert (found.state, found.cancelled_by_uid, found.point) == ("CANCELLED", 1001, "p")
    cause = cause_of(found, CANCELLED, own_uid=1000)
    assert cause.failure_class == FailureClass.CANCELLED
    assert "by user 1001" in cause.message
    assert FailureClass.CANCELLED in WORTH_RETRYING
    assert "by you, outside of this sweep" in cause_of(found, CANCELLED, own_uid=1001).message


def squeue_line(number="7", state="RUNNING", point="p", folder="/w", reason="None"):
    return f"{number}|{state}|{reason}|n1|rule_run_point_wildcards_{point}|{folder}"


def test_only_jobs_of_this_checkout_and_this_rule_are_ours():
    text = "\n".join(
        [
            squeue_line(),
            squeue_line("8", folder="/other"),
            "9|RUNNING|None|n1|rule_environment_wildcards_x|/w",
            "10|RUNNING|None|n1|(null)|/w",
            "broken line",
            squeue_line("11", "PENDING", "q", reason="Resources"),
        ]
    )
    found = parse_squeue(text, Path("/w"))
    assert [(one.id, one.point, one.live, one.reason) for one in found] == [
        ("7", "p", True, None),
        ("11", "q", True, "Resources"),
    ]


@pytest.mark.parametrize("state", ["COMPLETED", "FAILED", "COMPLETING", "CANCELLED", "TIMEOUT", "NODE_FAIL", "UNKNOWN"])
def test_an_ended_job_is_not_waited_for(state):
    assert not job(state).live


def says(**answers):
    """Return a stand-in for Slurm's commands that notes what it was asked."""
    asked = []

    def command(argv):
        asked.append(argv)
        return answers.get(argv[0], Answer(127, "", "not installed"))

    return command, asked


def test_s1_accounting_that_is_off_is_no_error(tmp_path):
    log = tmp_path / ".snakemake/slurm_logs/rule_run_point/p/5.log"
    log.parent.mkdir(parents=True)
    log.write_text(TIME_LIMIT)
    command, _ = says(sacct=Answer(1, "", "Slurm accounting storage is disabled"))
    (found,) = ended(tmp_path, [], command)
    assert (found.id, found.state) == ("5", "UNKNOWN")
    assert cause_of(found, log.read_text()).failure_class == FailureClass.TIME_LIMIT


def test_s2_a_database_that_is_down_hides_nothing_that_squeue_knows(tmp_path):
    command, _ = says(sacct=Answer(1, "", "sacct: error: slurmdbd: Connection refused"))
    known = [Job("5", "p", "CANCELLED"), Job("6", "q", "RUNNING")]
    assert ended(tmp_path, known, command) == [known[0]]


def test_s4_sacct_is_asked_by_id_without_a_window_of_time(tmp_path):
    command, asked = says(sacct=Answer(0, "5|CANCELLED by 1001|None|n1\n", ""))
    (found,) = ended(tmp_path, [Job("5", "p", "CANCELLED")], command)
    assert found.cancelled_by_uid == 1001
    assert not any("time" in word or word == "-S" for word in asked[0])
    assert asked[0][-1] == "5"


def test_s5_a_job_that_slurm_no_longer_knows_has_not_succeeded(tmp_path):
    log = tmp_path / ".snakemake/slurm_logs/rule_run_point/p/5.log"
    log.parent.mkdir(parents=True)
    log.touch()
    command, _ = says(sacct=Answer(0, "", ""))
    (found,) = ended(tmp_path, [], command)
    assert found.state == "UNKNOWN"


def test_s2_a_request_that_is_dropped_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr("workflow.jobs.ASK_AGAIN_S", 0.0)
    (tmp_path / ".snakemake/slurm_logs/rule_run_point").mkdir(parents=True)
    answers = [Answer(1, "", "Unexpected missing socket error"), Answer(0, squeue_line(folder=str(tmp_path)), "")]
    assert [job.id for job in queue(tmp_path, lambda _argv: answers.pop(0))] == ["7"]


def test_who_cannot_see_the_queue_submits_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("workflow.jobs.ASK_AGAIN_S", 0.0)
    command, _ = says(squeue=Answer(1, "", "Unable to contact slurm controller"))
    assert queue(tmp_path, command) == [], "Slurm was never used from here"
    (tmp_path / ".snakemake/slurm_logs/rule_run_point").mkdir(parents=True)
    with pytest.raises(InputError, match="Unable to contact slurm controller"):
        queue(tmp_path, command)


def test_a_machine_without_slurm_has_no_queue(tmp_path):
    (tmp_path / ".snakemake/slurm_logs/rule_run_point").mkdir(parents=True)
    assert queue(tmp_path, says()[0]) == []


def test_the_newest_job_of_a_point_counts_by_number():
    found = newest_by_point([Job("10", "p", "RUNNING"), Job("9", "p", "PENDING")])
    assert found["p"].id == "10"


SUBMITTED = "Job 10 has been submitted with SLURM jobid 7 (log: x/7.log).\n"
REFUSED = """[Tue Dec  1 06:36:12 2026]
Error in rule run_point:
    message: SLURM sbatch failed. The error message was 'sbatch: error: invalid partition specified: gone
sbatch: error: Batch job submission failed: Invalid partition name specified'.
    sbatch call:
        sbatch --parsable
    jobid: 7
    output: results/runs/tiny-c1-063ef09414/run.json

[Tue Dec  1 06:36:13 2026]
Error in rule run_point:
    message: SLURM-job '5' failed, SLURM status is: 'FAILED'.
    output: results/runs/tiny-c2-063ef09414/run.json
"""


def test_s8_a_refused_submission_is_known_by_its_point():
    assert refused(REFUSED, Path()) == {
        "tiny-c1-063ef09414": "sbatch: error: invalid partition specified: gone "
        "sbatch: error: Batch job submission failed: Invalid partition name specified"
    }
    assert FailureClass.SUBMIT_REFUSED not in WORTH_RETRYING


def test_jobs_of_a_head_that_its_user_stopped_were_cancelled_by_us():
    assert cancelled_by_us(SUBMITTED) == set()
    assert cancelled_by_us(SUBMITTED + "Terminating processes on user request, this might take some time.\n") == {"7"}
