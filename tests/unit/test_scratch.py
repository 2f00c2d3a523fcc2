"""Where a file tier lies, when its disk counts as full, and what becomes of what killed attempts left."""

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from workflow import scratch
from workflow.config import Cluster
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


@pytest.mark.parametrize("names", [(), ("kv-tier",)])
def test_a_container_may_write_to_what_is_there(tmp_path, names):
    parts = SimpleNamespace(paths={}, environments={})
    plan = SimpleNamespace(cache=None, scratch=names)
    point = SimpleNamespace(row=SimpleNamespace(runner="cluster:b200-x"), plan=plan)
    (tmp_path / "disk").mkdir()
    for cluster in (BARE, on(tmp_path / "disk")):
        mounts = launcher_for(point, cluster, None, parts, tmp_path / "a", "a").mounts
        written = [path for path, mode in mounts if mode == "rw"]
        folder = scratch.folder_of(cluster, tmp_path / "a", "a")
        with scratch.claimed(folder, names):
            assert (folder in written) == (cluster is not BARE and names != ())
            assert all(path.is_dir() for path in written if path != tmp_path / "a")


def test_a_disk_is_named_from_the_root_on():
    with pytest.raises(ValueError, match="found 'local/nvme': a folder on a node is named from / on"):
        Cluster(launcher="bare", scratch="local/nvme")


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
    (tmp_path / "kv-tier/rank0").mkdir(parents=True)
    (tmp_path / "kv-tier/rank0/block").write_bytes(bytes(300_000_000))
    monkeypatch.setattr(scratch, "RESERVE_BYTES", 0)
    assert scratch.full(tmp_path, ("kv-tier",)) is None
    monkeypatch.setattr(scratch, "RESERVE_BYTES", 1 << 60)
    assert scratch.full(tmp_path, ("prometheus",)) is None
    assert f"has written 0.3 GB to {tmp_path}, which leaves" in scratch.full(tmp_path, ("kv-tier",))
    scratch.empty(tmp_path, ("kv-tier",))
    assert list((tmp_path / "kv-tier/rank0").iterdir()) == []


HOLDER = """
import sys, time
from pathlib import Path
from workflow import scratch
with scratch.claimed(Path(sys.argv[1]), ("kv-tier",)):
    (Path(sys.argv[1]) / "kv-tier/block").write_bytes(bytes(700))
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def places(tmp_path):
    """Return folders of attempts, each held by a process of its own, and how to kill one."""
    cluster = on(tmp_path / "disk")
    runs = tmp_path / "results/runs"
    own = {
        "run": runs / "p/a/scratch",
        "shared": tmp_path / "results/shared/0-1/b/server/scratch",
        "disk": scratch.folder_of(cluster, runs / "q", "c"),
    }
    command = [sys.executable, "-c", HOLDER]
    held = {name: subprocess.Popen([*command, place], stdout=subprocess.PIPE) for name, place in own.items()}

    def kill(name):
        held[name].kill()
        held[name].wait()

    for process in held.values():
        process.stdout.readline()
    yield SimpleNamespace(own=own, kill=kill, remove=lambda: scratch.remove_dead(runs, cluster))
    for name, process in held.items():
        kill(name)
        process.stdout.close()


def test_what_killed_attempts_left_is_removed_and_what_live_ones_use_is_not(places):
    assert places.remove() == []
    for name in ("run", "shared", "disk"):
        place = places.own[name]
        places.kill(name)
        says = f"removed scratch kv-tier: 700 bytes, left by a killed attempt in {place}"
        assert places.remove() == [says]
        assert not place.exists()
    assert places.remove() == []


@pytest.mark.parametrize("boot", ["", "another machine, or this one before it was started anew\n"])
def test_what_cannot_be_told_to_be_dead_is_left(places, boot):
    places.kill("disk")
    (places.own["disk"] / scratch.OWNER).write_text(boot)
    stranger = places.own["disk"].parent / "offload-sweep-data"
    stranger.mkdir()
    assert places.remove() == []
    assert places.own["disk"].is_dir()
    assert stranger.is_dir()


def test_two_that_start_at_once_may_clean_up_the_same_folder(places, monkeypatch):
    for name in places.own:
        places.kill(name)
    real = scratch._size

    def slow(folder):
        shutil.rmtree(folder)  # the other one was faster
        return real(folder)

    monkeypatch.setattr(scratch, "_size", slow)
    assert len(places.remove()) == 3


def test_a_plan_without_scratch_makes_no_folder(tmp_path):
    with scratch.claimed(tmp_path / "scratch", ()):
        assert not (tmp_path / "scratch").exists()
