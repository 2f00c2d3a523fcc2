"""Every way in which a job ends on a real Slurm, told apart."""

import os
import re
import signal
import subprocess
from itertools import combinations
from pathlib import Path

from checkouts import QUICK, planned, slurm_says, until

# One figure needs the judgement and comparison of all points; drawing the others shows nothing about Slurm.
FIGURE = "results/figures/sweep.svg"


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
            "llamacpp-ram-c3": {"wait": True},
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
    checkout.job_of("llamacpp-ram-c1", "TIMEOUT")
    # The sound point last: Snakemake looks at the queue less and less often while nothing succeeds.
    checkout.behave({})
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
    assert len(due(said)) == 6
    assert not set(due(said)) & set(measured)


def test_a_head_that_is_killed_loses_no_result_and_doubles_no_job(checkout):
    """Two clusters, six points, one fails twice and then works; the head process is killed in the middle."""
    checkout.behave({"none-c1": {"wait": True}, "llamacpp-ram-c1": {"wait": True}, "none-c2": {"fail": 2}})
    first = [f"results/runs/{point}/run.json" for point in planned(checkout) if "-c1-" in point]
    head = checkout.start("--profile", "slurm", *QUICK, *first)
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
    assert [state for _, state, _ in checkout.jobs()] == ["RUNNING"] * 2, "the jobs went on"
    before = len(checkout.said)
    head = checkout.start("--profile", "slurm", *QUICK, FIGURE)
    until(lambda: checkout.said[before:].count("of an earlier run") == 2, "the next head process waits for both")
    checkout.behave({"none-c2": {"fail": 2}})
    code, said = head.wait(240), checkout.said[before:]
    assert code == 0, said[-3000:]
    assert said.count("took over the result of job") == 2
    assert (checkout.root / FIGURE).exists()
    points = [point for _, _, point in checkout.jobs()]
    seen = checkout.seen()
    # S7: one job an attempt, and no retry inside of a job.
    assert len(points) == len(seen) == 8
    for point in set(points):
        attempts = [path for path in (checkout.root / "results/runs" / point).iterdir() if path.is_dir()]
        assert len(attempts) == points.count(point) == (3 if "-none-c2-" in point else 1)
    for record in seen:
        assert record["partition"] == ("gpu-a" if "-none-" in record["point"] else "gpu-b")
        assert len(record["gpus"].split(",")) == 2
    at_once = [(a, b) for a, b in combinations(seen, 2) if a["begin"] < b["end"] and b["begin"] < a["end"]]
    assert at_once, "points are measured beside each other"
    for one, other in at_once:
        assert not set(one["gpus"].split(",")) & set(other["gpus"].split(",")), "two points on one GPU"

    # S16, S17: neither the same command nor an edit of code that is not measured plans a job.
    plot = checkout.root / "workflow/style.py"
    plot.write_text(plot.read_text() + "\n")
    code, said = checkout.snakemake("--profile", "slurm", *QUICK, "--until", "run_point")
    assert code == 0
    assert "total        0" in said, "also a result that was taken over is not out of date"
    # Also without the profile, whose triggers are fewer.
    code, said = checkout.snakemake("-n", "-c1")
    assert due(said) == []
    # A selection is forced through Snakemake's own -R, and costs one job a point.
    chosen = checkout.status("--select", "arm=none,concurrency=2")
    assert chosen.returncode == 0
    code, said = checkout.snakemake("-n", "--profile", "slurm", "--until", "run_point", "-R", *chosen.stdout.split())
    assert code == 0, said[-3000:]
    assert len(due(said)) == 1
    assert "-none-c2-" in due(said)[0]


def test_a_node_that_goes_down_and_comes_back_and_then_ctrl_c(checkout):
    """Slurm queues the lost jobs again; Ctrl-C cancels what this sweep submitted and nothing else."""
    checkout.behave({"none-c1": {"wait": True}, "none-c2": {"wait": True}})
    targets = [
        f"results/runs/{point}/run.json" for point in planned(checkout) if "-none-" in point and "-c3-" not in point
    ]
    head = checkout.start("--profile", "slurm", *QUICK, "--retries", "0", *targets)
    until(lambda: len(checkout.seen()) == 2, "two replays")
    node("cut")
    job = {key: checkout.job_of(key, "PENDING") for key in ("none-c1", "none-c2")}
    assert checkout.states()["none-c1"]["state"] == "queued"
    node("slurmd")
    # Slurm holds a job that lost its node back for two minutes.
    slurm_says("scontrol", "update", f"jobid={job['none-c1']},{job['none-c2']}", "starttime=now")
    until(lambda: len(checkout.seen()) == 4, "both are measured anew")
    checkout.behave({"none-c2": {"wait": True}})
    assert checkout.job_of("none-c1", "COMPLETED") == job["none-c1"], "the same job again"

    stranger = slurm_says("sbatch", "--parsable", "--output=/dev/null", "--mem=50", "--wrap", "sleep 120").strip()
    until(
        lambda: "RUNNING" in slurm_says("squeue", "--noheader", "--format=%T", "--jobs", stranger), "a stranger's job"
    )
    head.send_signal(signal.SIGINT)
    head.wait(60)
    until(lambda: not any(state in ("RUNNING", "PENDING") for _, state, _ in checkout.jobs()), "all are cancelled")
    assert slurm_says("squeue", "--noheader", "--format=%T", "--jobs", stranger).strip() == "RUNNING"
    slurm_says("scancel", stranger)
    states = checkout.states()
    assert states["none-c1"]["state"] == "measured", "what was measured is kept"
    assert states["none-c2"]["reasons"] == ["interrupted"]


def due(said):
    """Return the points that a dry run would measure."""
    return re.findall(r"^Job \d+: Measure (\S+) on ", said, re.MULTILINE)


def node(command):
    """End or start the node of the test's Slurm."""
    folder = Path(os.environ["SLURM_CONF"]).parent
    subprocess.run(["bash", str(Path(__file__).parent / "cluster.sh"), command, str(folder)], check=True)
