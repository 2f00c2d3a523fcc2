"""Every way in which a job ends on a real Slurm, told apart."""

import os
import re
import signal
import subprocess
from pathlib import Path

from checkouts import QUICK, planned, slurm_says, until

# One figure needs the judgement and comparison of all points; drawing the others shows nothing about Slurm.
FIGURE = "results/figures/sweep.svg"
ARMS = [f"{arm}-c{concurrency}" for arm in ("none", "llamacpp-ram") for concurrency in (1, 2, 3)]


def test_failures_are_told_apart_and_cost_no_other_point(checkout):
    """Client, engine, memory, scancel, time-out and a refused job in one sweep; one point is sound."""
    checkout.edit("configs/perf-changelog.yaml", "[tiny-a, tiny-b]", "[tiny-a, tiny-b, tiny-c]")
    checkout.behave(
        {
            "none-c1": {"fail": 1},
            "none-c2": {"kill_engine": True},
            "none-c3": {"memory_mb": 1500},
            "llamacpp-ram-c1": {"wait": True},
            "llamacpp-ram-c2": {"wait": True},
        }
    )
    head = checkout.start("--profile", "slurm", *QUICK, "--retries", "0")
    # Eight GPUs hold four points at a time, in an order that Slurm chooses; each of these two is ended as it replays.
    left = {"llamacpp-ram-c1": ("scontrol", "update", "timelimit=0"), "llamacpp-ram-c2": ("scancel",)}

    def both_ended():
        for record in checkout.seen():
            key = next((key for key in left if f"-{key}-" in record["point"]), None)
            if key is None:
                continue
            state = checkout.states()[key]
            if state["detail"].startswith("replay"):
                assert state["state"] == "running"
                # Slurm counts limits in minutes, and ends a job within half a minute after them.
                command = left.pop(key)
                slurm_says(*command, f"jobid={record['job']}" if len(command) > 1 else record["job"])
        return not left

    until(both_ended, "the phase of both while they run")
    assert head.wait(200) == 1, checkout.said[-3000:]
    states = checkout.states()
    reasons = {key: (state["state"], *state["reasons"]) for key, state in states.items()}
    assert reasons["none-c1"] == ("failed", "client_failed")
    assert reasons["none-c2"] == ("failed", "engine_died")
    assert reasons["none-c3"] == ("failed", "out_of_memory")
    assert reasons["llamacpp-ram-c1"] == ("failed", "time_limit")
    assert reasons["llamacpp-ram-c2"] == ("failed", "cancelled")
    assert reasons["none-c7"] == ("failed", "submit_refused")
    assert reasons["llamacpp-ram-c3"][0] in ("done", "invalid")
    assert "illegal memory access" in states["none-c2"]["detail"], "the first cause is named"
    # What the user reads at the end names each.
    end = checkout.said[-6000:]
    for word in ("client_failed", "engine_died", "out_of_memory", "time_limit", "cancelled", "invalid partition"):
        assert word in end
    # S14: a job that was killed leaves nothing that counts as a result.
    measured = [path.parent.name for path in (checkout.root / "results/runs").glob("*/run.json")]
    assert len(measured) == 1

    # What is there can be drawn; what is not is said.
    code, said = checkout.snakemake(FIGURE, "-c2", "--config", "partial=true")
    assert code == 0, said[-3000:]
    assert len(checkout.jobs()) == 6
    assert (checkout.root / FIGURE).exists()

    # The same command again measures exactly the missing ones.
    code, said = checkout.snakemake("--profile", "slurm", "--dry-run")
    assert code == 0, said[-3000:]
    due = re.findall(r"^Job \d+: Measure (\S+) on ", said, re.MULTILINE)
    assert len(due) == 6
    assert not set(due) & set(measured)


def test_a_head_that_is_killed_loses_no_result_and_doubles_no_job(checkout):
    checkout.behave({key: {"wait": True} for key in ARMS})
    head = checkout.start("--profile", "slurm", *QUICK, "--jobs", "2")
    until(lambda: len([1 for _, state, _ in checkout.jobs() if state == "RUNNING"]) == 2, "two running jobs")
    until(lambda: len(checkout.seen()) == 2, "two replays")
    head.send_signal(signal.SIGKILL)
    head.wait()
    submitted = {number for number, _, _ in checkout.jobs()}

    answer = checkout.status()
    assert answer.returncode == 0
    assert "snakemake --unlock" in answer.stdout
    assert "2 running" in answer.stdout

    code, said = checkout.snakemake("--profile", "slurm", *QUICK)
    assert code != 0
    assert "snakemake --unlock" in said
    assert {number for number, _, _ in checkout.jobs()} == submitted, "a locked folder submits nothing"

    assert checkout.snakemake("--profile", "slurm", "--unlock")[0] == 0
    running = [number for number, state, _ in checkout.jobs() if state == "RUNNING"]
    assert len(running) == 2, "the jobs went on"
    before = len(checkout.said)
    head = checkout.start("--profile", "slurm", *QUICK, FIGURE)
    until(lambda: checkout.said[before:].count("of an earlier run") == 2, "the next head process waits for both")
    checkout.behave({})
    code, said = head.wait(240), checkout.said[before:]
    assert code == 0, said[-3000:]
    points = [point for _, _, point in checkout.jobs()]
    assert len(points) == len(set(points)) == 6, "every point was submitted once"
    assert said.count("took over the result of job") == len(running)
    for point in points:
        attempts = [path for path in (checkout.root / "results/runs" / point).iterdir() if path.is_dir()]
        assert len(attempts) == 1
    assert (checkout.root / FIGURE).exists()
    code, said = checkout.snakemake("--profile", "slurm", *QUICK, FIGURE)
    assert "Nothing to be done" in said, "a result that was taken over is not out of date"
    # Also without the profile, whose triggers are fewer.
    code, said = checkout.snakemake("-n", "-c1")
    assert "run_point" not in said.split("Building DAG")[-1]


def test_ctrl_c_cancels_what_this_sweep_submitted_and_nothing_else(checkout):
    stranger = slurm_says("sbatch", "--parsable", "--output=/dev/null", "--mem=50", "--wrap", "sleep 120").strip()
    checkout.behave({key: {"wait": True} for key in ARMS})
    head = checkout.start("--profile", "slurm", *QUICK, "--jobs", "2")
    until(lambda: len(checkout.seen()) == 2, "two replays")
    head.send_signal(signal.SIGINT)
    head.wait(60)
    until(lambda: all(state not in ("RUNNING", "PENDING") for _, state, _ in checkout.jobs()), "all cancelled")
    assert slurm_says("squeue", "--noheader", "--format=%T", "--jobs", stranger).strip() == "RUNNING"
    slurm_says("scancel", stranger)
    assert {state["reasons"][0] for state in checkout.states().values() if state["reasons"]} == {"interrupted"}


def test_a_node_that_goes_down_and_comes_back(checkout):
    checkout.behave({"none-c1": {"wait": True}})
    target = next(point for point in planned(checkout) if "-none-c1-" in point)
    head = checkout.start("--profile", "slurm", *QUICK, "--retries", "0", f"results/runs/{target}/run.json")
    until(lambda: len(checkout.seen()) == 1, "the replay")
    node("cut")
    job = checkout.job_of("none-c1", "PENDING")
    assert checkout.states()["none-c1"]["state"] == "queued"
    checkout.behave({})
    node("slurmd")
    # Slurm holds a job that lost its node back for two minutes.
    slurm_says("scontrol", "update", f"jobid={job}", "starttime=now")
    assert head.wait(150) == 0, checkout.said[-3000:]
    assert len(checkout.jobs()) == 1, "Slurm queued the same job again"
    assert len(checkout.seen()) == 2, "and it measured anew"


def node(command):
    """End or start the node of the test's Slurm."""
    folder = Path(os.environ["SLURM_CONF"]).parent
    subprocess.run(["bash", str(Path(__file__).parent / "cluster.sh"), command, str(folder)], check=True)
