"""A sweep on a real Slurm, from a clean checkout."""

import pytest
from checkouts import QUICK, planned


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
