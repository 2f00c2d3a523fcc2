"""A sweep on a real Slurm, from a clean checkout."""

import re
from itertools import combinations

import pytest
from checkouts import QUICK, planned


def test_two_clusters_six_points_one_fails_twice_and_then_works(checkout):
    checkout.behave({"none-c2": {"fail": 2}})
    code, said = checkout.snakemake("--profile", "slurm", *QUICK, "--until", "run_point")
    assert code == 0, said[-3000:]
    seen = checkout.seen()
    attempts = [record["point"] for record in seen]
    # S7: one job an attempt, and no retry inside of a job.
    assert len(attempts) == len(checkout.jobs()) == 8
    assert sum("-none-c2-" in point for point in attempts) == 3
    for record in seen:
        assert record["partition"] == ("gpu-a" if "-none-" in record["point"] else "gpu-b")
        assert len(record["gpus"].split(",")) == 2
    for one, other in combinations(seen, 2):
        if one["begin"] < other["end"] and other["begin"] < one["end"]:
            assert not set(one["gpus"].split(",")) & set(other["gpus"].split(",")), "two points on one GPU"
    assert {state["state"] for state in checkout.states().values()} == {"measured"}
    # S16, S17: neither the same command nor an edit of code that is not measured plans a job.
    plot = checkout.root / "workflow/style.py"
    plot.write_text(plot.read_text() + "\n")
    code, said = checkout.snakemake("--profile", "slurm", *QUICK, "--until", "run_point")
    assert code == 0
    assert "total        0" in said

    # A selection is forced through Snakemake's own -R, and costs one job a point.
    chosen = checkout.status("--select", "arm=none,concurrency=2")
    assert chosen.returncode == 0
    code, said = checkout.snakemake("-n", "--profile", "slurm", "--until", "run_point", "-R", *chosen.stdout.split())
    assert code == 0, said[-3000:]
    due = re.findall(r"^Job \d+: Measure (\S+) on ", said, re.MULTILINE)
    assert len(due) == 1
    assert "-none-c2-" in due[0]


def test_the_second_executor(checkout):
    """The same sweep through cluster-generic, with the submit command that the docs show."""
    pytest.importorskip("snakemake_executor_plugin_cluster_generic", reason="make test-slurm installs the plugin")
    code, said = checkout.snakemake(
        "--profile", "configs/profiles/cluster-generic", "--jobs", "6", "--until", "run_point"
    )
    assert code == 0, said[-3000:]
    seen = checkout.seen()
    assert len(checkout.jobs()) == len(seen) == 6
    assert {record["partition"] for record in seen} == {"gpu-a", "gpu-b"}
    assert all(len(record["gpus"].split(",")) == 2 for record in seen)


def test_without_a_cluster(checkout):
    """The same search space on this machine, one point after the other."""
    target = planned(checkout)[0]
    code, said = checkout.snakemake("--executor", "local", "--cores", "2", f"results/runs/{target}/run.json")
    assert code == 0, said[-3000:]
    assert checkout.jobs() == []
    assert len(checkout.seen()) == 1


def test_a_wall_time_that_is_too_short_is_refused_before_anything_is_submitted(checkout):
    checkout.edit(
        "configs/clusters.yaml",
        "partition: gpu-b, constraint: big, time_limit_min: 60, margin_min: 3",
        "partition: gpu-b, time_limit_min: 60, margin_min: 61",
    )
    code, said = checkout.snakemake("--profile", "slurm", *QUICK)
    assert code == 1
    assert "clusters.cluster:b.slurm.time_limit_min" in said
    assert "needs 62 min (start-up" in said
    assert "Traceback" not in said
    assert checkout.jobs() == []


def test_effective_resources_are_shown_before_anything_is_submitted(checkout):
    """S11: they are the rule's own, so a `--default-resources` of the user does not drop them. S20: with their unit."""
    assert checkout.snakemake("-n", "--profile", "slurm", "--default-resources", "tmpdir='/tmp'")[0] == 0
    said = checkout.said
    assert "on gpu-a, gpu:2, 2 cores, 668 MiB, 4m, --exclude=" in said
    assert "on gpu-b, gpu:2, 2 cores, 2575 MiB, 4m, constraint big" in said
