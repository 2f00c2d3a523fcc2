"""What is asked of Slurm for a point."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from points import point
from pydantic import ValidationError

from workflow import yamlfile
from workflow.allocation import LONGEST_MIN, MIB, allocate, check_time_limits, needed_s
from workflow.config import Cluster, Clusters, Slurm
from workflow.contract import InputError

FILE = Path("configs/clusters.yaml")


def cluster(**slurm):
    settings = {"partition": "gpu", "time_limit_min": 240, **slurm}
    return Cluster(launcher="bare", cores_per_point=96, slurm=Slurm(**settings))


def test_gpus_of_the_point_reach_gres():
    eight = point()
    assert eight.gpus == 8
    assert allocate(eight, cluster()).gres == "gpu:8"
    assert allocate(eight, cluster(gres="gpu:b200")).gres == "gpu:b200:8"
    assert allocate(eight, cluster(gres=None)).gres is None


def test_runtime_is_the_sum_of_its_parts_and_has_a_unit():
    """S20: a bare number is taken for minutes here and for hours there."""
    one = point(duration_s=1800.0, grace_s=60.0)
    seconds = one.costs.startup_s + one.costs.warmup_s + 1800 + 60 + 15 * 60
    assert needed_s(one, cluster().slurm) == seconds
    found = allocate(one, cluster()).runtime
    assert found == f"{-(-seconds // 60):.0f}m"


def test_a_later_attempt_gets_more_time_and_memory_but_never_more_than_the_limit():
    one = point(duration_s=1800.0)
    first, second = (allocate(one, cluster(), attempt) for attempt in (1, 2))
    assert second.runtime_min == first.runtime_min + 15
    assert second.memory_mib - first.memory_mib == pytest.approx(64e9 / MIB, abs=1)
    assert allocate(one, cluster(), 99).runtime_min == 240


def test_memory_holds_what_the_tier_pins():
    none, offload = point(), point(backend="vllm-simple")
    pinned = offload.plan.pinned_bytes
    assert pinned > 1e12
    difference = allocate(offload, cluster()).memory_mib - allocate(none, cluster()).memory_mib
    assert difference == pytest.approx(pinned / MIB, abs=1)


@given(st.integers(1, LONGEST_MIN), st.floats(0.5, 120), st.floats(1, 4 * 3600))
def test_no_planned_job_is_longer_than_its_limit(limit, margin, duration):
    one, there = point(duration_s=duration), cluster(time_limit_min=limit, margin_min=margin)
    try:
        check_time_limits([one], {one.row.runner: there}, FILE)
    except InputError:
        assert needed_s(one, there.slurm) > limit * 60
    else:
        assert needed_s(one, there.slurm) <= allocate(one, there).runtime_min * 60 <= limit * 60


def test_a_limit_that_is_too_short_is_refused_with_all_numbers():
    one = point(duration_s=3600.0)
    with pytest.raises(InputError) as caught:
        check_time_limits([one], {one.row.runner: cluster(time_limit_min=60)}, FILE)
    said = str(caught.value)
    assert said.startswith("configs/clusters.yaml: clusters.cluster:b200-dgxc.slurm.time_limit_min: ")
    for part in ("start-up", "warm-up", "window 60", "drain", "margin 15", "at most 60 min", "replay.duration_s"):
        assert part in said


def test_s4_a_job_that_the_plugin_would_lose_sight_of_is_refused():
    """The plugin asks sacct for two days only; a job that is older is waited for without end."""
    one = point(duration_s=47.5 * 3600)
    with pytest.raises(InputError, match="at most 2820 min"):
        check_time_limits([one], {one.row.runner: cluster(time_limit_min=10_000)}, FILE)


def test_excluded_nodes_and_whole_nodes_are_quoted_for_the_shell():
    """S10: the plugin hands the line to a shell, where node[1-3] is a pattern."""
    found = allocate(point(), cluster(exclude=("node[1-3]", "bad7"), exclusive=True)).extra
    assert found == "--exclusive --exclude='node[1-3],bad7'"
    assert allocate(point(), cluster()).extra is None


@pytest.mark.parametrize("nodes", ["a b", "x; rm -rf .", "$(id)", "-x", "a'b"])
def test_a_node_list_holds_nothing_that_a_shell_would_read(nodes):
    with pytest.raises(ValidationError):
        Slurm(partition="gpu", time_limit_min=1, exclude=(nodes,))


def test_a_machine_without_slurm_is_asked_for_nothing():
    assert allocate(point(), Cluster(launcher="bare")) is None


def test_slurm_needs_the_cores_of_a_point():
    text = b"clusters:\n  cluster:x:\n    launcher: bare\n    slurm: {partition: gpu, time_limit_min: 60}\n"
    with pytest.raises(InputError, match="cores_per_point is needed"):
        yamlfile.validate(Clusters, yamlfile.parse(text, FILE), FILE)
