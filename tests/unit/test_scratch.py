"""Where a file tier lies, when its disk counts as full, and what becomes of what killed attempts left."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from workflow import scratch
from workflow.config import Cluster
from workflow.lease import Lease, lease
from workflow.runs import launcher_for

BARE = Cluster(launcher="bare")


def on(disk):
    return BARE.model_copy(update={"scratch": str(disk)})


def test_a_tier_lies_below_the_attempt_or_on_the_disk_that_the_cluster_names(tmp_path):
    attempt = tmp_path / "results/runs/p/20260101T000000-1"
    assert scratch.folder_of(BARE, attempt, attempt.name) == attempt / "scratch"
    named = scratch.folder_of(on("/local"), attempt, attempt.name)
    assert named.parent == Path("/local")
    assert named.name.startswith("offload-sweep-")
    assert named.name.endswith(attempt.name)


def test_a_container_may_write_to_it(tmp_path):
    parts = SimpleNamespace(paths={}, environments={})
    row = SimpleNamespace(runner="cluster:b200-x")
    point = SimpleNamespace(row=row, plan=SimpleNamespace(cache=None))
    for cluster in (BARE, on("/local")):
        mounts = launcher_for(point, cluster, None, parts, tmp_path / "a", "a").mounts
        assert ((scratch.folder_of(cluster, tmp_path / "a", "a"), "rw") in mounts) == (cluster is not BARE)
        assert (tmp_path / "a", "rw") in mounts


def test_a_disk_that_a_node_lacks_is_named_with_what_to_do(tmp_path):
    assert scratch.unusable(BARE) is None
    assert scratch.unusable(on(tmp_path)) is None
    says = scratch.unusable(on(tmp_path / "none"))
    assert says == (
        f"scratch: {tmp_path}/none is no folder on this node; make it there, or name another one in clusters.yaml"
    )


def test_what_services_wrote_is_measured_and_removed(tmp_path):
    # A file tier of tens of gigabytes would be hashed as an artefact, and the next attempt would find the disk full.
    tier = tmp_path / "scratch/kv-tier/rank0"
    tier.mkdir(parents=True)
    (tier / "block").write_bytes(bytes(700))
    (tmp_path / "scratch/prometheus").mkdir()
    found = scratch.remove(tmp_path / "scratch")
    assert found == ["removed scratch kv-tier: 700 bytes", "removed scratch prometheus: 0 bytes"]
    assert not (tmp_path / "scratch").exists()
    assert scratch.remove(tmp_path / "scratch") == []


def test_only_a_file_tier_can_fill_its_disk(tmp_path, monkeypatch):
    scratch.make(tmp_path, ("kv-tier", "prometheus"))
    (tmp_path / "kv-tier/block").write_bytes(bytes(300_000_000))
    assert scratch.full(tmp_path, ("kv-tier",)) is None
    monkeypatch.setattr(scratch, "RESERVE_BYTES", 1 << 60)
    assert scratch.full(tmp_path, ("prometheus",)) is None
    assert f"has written 0.3 GB to {tmp_path}, which leaves" in scratch.full(tmp_path, ("kv-tier",))


def test_what_killed_attempts_left_is_found_and_what_others_use_is_not(tmp_path):
    runs, disk = tmp_path / "results/runs", tmp_path / "local"
    cluster = on(disk)
    below = [runs / "p/dead/scratch", runs / "q/live/scratch", tmp_path / "results/shared/0-1/gone/server/scratch"]
    beside = [scratch.folder_of(cluster, runs / "p", name) for name in ("dead", "live", "mine")]
    strangers = [disk / "offload-sweep-00000000-dead", disk / "data"]
    for folder in (*below, *beside, *strangers):
        folder.mkdir(parents=True)
    with lease(runs / "q", "live"):
        found = scratch.left_behind(runs, cluster, "mine")
    assert sorted(found) == sorted([below[0], below[2], beside[0]])


def test_an_attempt_of_another_node_lives_by_the_clock_of_the_file_system(tmp_path):
    runs = tmp_path / "runs"
    there, later = Lease(attempt="there", host="another-node", pid=1, born="", stopping=False), time.time() + 600
    for name, age_s in (("there", 5), ("gone", 900)):
        (runs / f"p-{name}/{name}/scratch").mkdir(parents=True)
        path = runs / f"p-{name}/lease.json"
        path.write_text(there.model_copy(update={"attempt": name}).model_dump_json())
        os.utime(path, (later - age_s, later - age_s))
    assert scratch.left_behind(runs, BARE, "mine") == [runs / "p-gone/gone/scratch"]


@pytest.mark.parametrize("disk", [None, "/local"])
def test_nothing_is_looked_up_where_nothing_was_left(tmp_path, monkeypatch, disk):
    monkeypatch.setattr(scratch, "live_attempts", lambda _: pytest.fail("thousands of leases are read for nothing"))
    (tmp_path / "runs/p").mkdir(parents=True)
    (tmp_path / "runs/p/lease.json").write_text("")
    cluster = BARE if disk is None else on(disk)
    assert scratch.left_behind(tmp_path / "runs", cluster, "mine") == []
