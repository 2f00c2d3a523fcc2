"""A sweep on a real Slurm, from a clean checkout."""

from itertools import combinations

from conftest import QUICK


def test_two_clusters_six_points_one_fails_twice_and_then_works(checkout):
    checkout.behave({"none-c2": {"fail": 2}})
    code, said = checkout.snakemake("--profile", "slurm", *QUICK)
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
    assert (checkout.root / "results/summary.md").exists()
    assert {state["state"] for state in checkout.states().values()} <= {"done", "invalid"}
    # S16: nothing is left to do.
    code, said = checkout.snakemake("--profile", "slurm", *QUICK)
    assert code == 0
    assert "Nothing to be done" in said

    # A selection is forced through Snakemake's own -R, and costs one job a point.
    chosen = checkout.status("--select", "arm=none,concurrency=2")
    assert chosen.returncode == 0
    code, said = checkout.snakemake(
        "--profile", "slurm", *QUICK, "--until", "run_point", "-R", *chosen.stdout.split()
    )
    assert code == 0, said[-3000:]
    assert len(checkout.jobs()) == 9
    assert "-none-c2-" in checkout.jobs()[-1][2]
