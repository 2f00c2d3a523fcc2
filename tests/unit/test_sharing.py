"""Points that take turns on one server: which, in which allocation, under which ids."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from arms import planned, recipes
from points import TRACES, point

from workflow.allocation import allocate, needed_s, turn_s
from workflow.config import Cluster, Replay, Slurm
from workflow.contract import InputError
from workflow.jobs import Answer, Job, ended, parse_squeue, refused
from workflow.plans import plan_for
from workflow.points import make_point, trace_identity
from workflow.sharing import Turns, allocations, check_emptied, saved_s, write_turns

REPLAY = Replay(duration_s=600.0, grace_s=30.0)
NOT_INSTALLED = Answer(127, "", "sacct is not installed")
COMMENT = "rule_run_shared_wildcards_0123456789-1"


def shared(concurrency, repeat=1, backend="none", shared_server=True, fixed_plan=True):
    """Return a point of a sweep with `share_server: true`; unless `fixed_plan`, its recipe looks at the concurrency."""
    asked = planned("dsv4-b200-vllm", backend)
    row = replace(asked, row=asked.row.model_copy(update={"conc": concurrency}))
    plan, costs = plan_for(asked if fixed_plan else row, recipes())
    locks = {"aiperf": "aiperf-00000000"}
    trace = trace_identity("few", TRACES, 1)
    return make_point(row, plan, costs, trace, REPLAY, None, locks, repeat, shared_server=shared_server)


def cluster(**slurm):
    return Cluster(
        launcher="bare", cores_per_point=96, slurm=Slurm(partition="gpu", **{"time_limit_min": 2820, **slurm})
    )


def test_a_shared_server_is_another_protocol():
    """Neither taken for the point with a server of its own, nor compared with it."""
    alone, together = shared(4, shared_server=False), shared(4)
    assert alone.id != together.id
    assert alone.group != together.group
    assert alone.curve != together.curve
    assert point().shared_server is False


def test_points_of_one_plan_take_turns_and_others_do_not():
    points = [shared(8), shared(4), shared(4, repeat=2), shared(4, backend="lmcache"), shared(4, shared_server=False)]
    (turns,) = allocations(points, {points[0].row.runner: cluster()})
    assert [(one.concurrency, one.repeat) for one in turns] == [(4, 1), (4, 2), (8, 1)]
    assert len({one.server_key for one in points}) == 3


def test_a_recipe_that_sizes_the_server_by_the_concurrency_shares_none():
    """As InferenceX's do (`--max-num-seqs` is twice the concurrency): only repeats of a point have one plan."""
    points = [shared(number, repeat, fixed_plan=False) for number in (4, 8) for repeat in (1, 2)]
    groups = allocations(points, {points[0].row.runner: cluster()})
    assert [[(one.concurrency, one.repeat) for one in members] for members in groups] == [
        [(4, 1), (4, 2)],
        [(8, 1), (8, 2)],
    ]


def test_an_allocation_is_no_longer_than_the_cluster_allows():
    points = [shared(number) for number in range(1, 7)]
    slurm = cluster().slurm
    limit_min = (needed_s(points[0], slurm) + 2 * turn_s(points[0])) / 60
    limited = cluster(time_limit_min=round(limit_min + 0.5))
    groups = allocations(points, {points[0].row.runner: limited})
    assert [len(members) for members in groups] == [3, 3]
    for first, *following in groups:
        seconds = needed_s(first, slurm) + sum(turn_s(one) for one in following)
        assert seconds <= limited.slurm.time_limit_min * 60
        assert allocate(first, limited, 1, following).runtime_min == pytest.approx(seconds / 60, abs=1)
    # The last is alone, so it is measured like any other.
    groups = allocations(points[:4], {points[0].row.runner: limited})
    assert [len(members) for members in groups] == [3]


def test_a_server_that_cannot_be_emptied_is_refused_with_all_arms_named():
    check_emptied([shared(4, shared_server=False)])
    with pytest.raises(InputError) as caught:
        check_emptied([shared(4), shared(4, backend="lmcache-v1")])
    said = str(caught.value)
    assert "share_server" in said
    assert "lmcache-v1 on vllm" in said
    assert "none on vllm" not in said


def test_a_new_allocation_is_not_taken_for_one_that_has_begun(tmp_path):
    points = [shared(4), shared(8)]
    (first,) = write_turns([tuple(points)], tmp_path, 3)
    assert list(write_turns([tuple(points)], tmp_path, 3)) == [first], "planning again changes nothing"
    (tmp_path / "shared" / first).mkdir()
    (second,) = write_turns([tuple(points)], tmp_path, 3)
    assert second != first
    assert json.loads((tmp_path / f"shared/{second}.json").read_text())["points"] == [one.id for one in points]


def test_the_computed_savings_in_the_docs(project):
    """Eleven concurrencies on one plan, by the facts of the recipes."""
    text = (project / "docs/shared-server.md").read_text()
    for name, key in (("8 B200", "dsv4-b200-vllm"), ("8 MI355X", "kimik3-mi355x-vllm")):
        one = point(key)
        alone_min = 11 * one.expected_s / 60
        saved_min = saved_s([one] * 11) / 60
        (row,) = [line for line in text.splitlines() if name in line]
        told = f"| {alone_min + 1e-9:,.0f} | {alone_min - saved_min + 1e-9:,.0f} | {saved_min:.0f} ("
        assert told in row
        assert f"({saved_min * one.gpus / 60:.1f} GPU-hours, {100 * saved_min / alone_min:.0f} %)" in row


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a checkout with an allocation for two points."""
    turns = Turns(schema_version=Turns.SCHEMA_VERSION, points=("p", "q"), tries=1)
    turns.write(tmp_path / "results/shared/0123456789-1.json")
    return tmp_path


def test_a_job_for_several_points_is_seen_at_each_of_them(folder):
    found = parse_squeue(f"7|RUNNING|None|n1|{COMMENT}|{folder}\n", folder)
    assert [(job.id, job.point, job.allocation) for job in found] == [
        ("7", "p", "0123456789-1"),
        ("7", "q", "0123456789-1"),
    ]
    gone = parse_squeue(f"7|RUNNING|None|n1|{COMMENT.replace('-1', '-2')}|{folder}\n", folder)
    assert gone == []


def test_the_end_of_such_a_job_is_told_of_each_point(folder):
    log = folder / ".snakemake/slurm_logs/rule_run_shared/0123456789-1/7.log"
    log.parent.mkdir(parents=True)
    log.write_text("x")
    found = ended(folder, [Job("7", "p", "TIMEOUT", allocation="0123456789-1")], lambda _argv: NOT_INSTALLED)
    assert {(job.point, job.state) for job in found} == {("p", "TIMEOUT"), ("q", "UNKNOWN")}
    assert {folder / job.log for job in found} == {log}


def test_a_refused_allocation_is_told_of_each_point(folder):
    said = """\
Error in rule run_shared:
    message: SLURM sbatch failed. The error message was 'sbatch: error: no such partition'.
    output: results/shared/0123456789-1.done.json
"""
    assert set(refused(said, folder)) == {"p", "q"}
