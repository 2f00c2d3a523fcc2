"""Images are imported whole, once, under their digest; the tools that cannot run here are scripts on the PATH."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from points import point as planned_point

from tests.conftest import put_on_path
from workflow.config import Cluster, Slurm
from workflow.contract import InputError
from workflow.failures import AttemptFailed, Failure, FailureClass
from workflow.images import Image, Reference, enroot_name, find_image, image_key, import_image
from workflow.points import plan_tsv

OLD, NEW = f"sha256:{'0a' * 32}", f"sha256:{'1b' * 32}"
NAME = "vllm/vllm-openai:v0.27.1"

# What the registry says a tag stands for is in the file `tag`; each fetch is a line in `fetched`. A file `fail` makes a
# fetch fail half-way; with a pipe `hold` it waits until somebody writes there.
FETCH = """
fetch() {
  echo "$2" >> "$TOOLS/fetched"
  echo half > "$1"
  if [ -p "$TOOLS/hold" ]; then echo > "$TOOLS/holding"; read -r _ < "$TOOLS/hold"; fi
  if [ -e "$TOOLS/fail" ]; then echo "[ERROR] manifest unknown" >&2; exit 1; fi
  echo "whole" > "$1"
}
"""
SCRIPTS = {
    "enroot": 'case "$1" in digest) cat "$TOOLS/tag";; import) fetch "$3" "$4";; esac',
    "skopeo": 'cat "$TOOLS/tag"',
    "apptainer": 'fetch "$2" "$3"',
    "docker": """case "$1 $2" in
      "image inspect") case "$4" in *.Id*) echo "sha256:$(echo "$5" | tail -c 65 | rev)";;
        *) echo "mirror/x@sha256:$(printf 'f%.0s' $(seq 64))"; echo "vllm/vllm-openai@$(cat "$TOOLS/tag")";; esac;;
      pull*) echo "$3" >> "$TOOLS/pulled"; if [ -e "$TOOLS/fail" ]; then echo "manifest unknown" >&2; exit 1; fi;;
      save*) fetch "$3" "$4";; esac""",
}


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """Return the folder of the scripts and of what they were asked."""
    folder = tmp_path / "tools"
    put_on_path(folder, {name: f"TOOLS={folder}\n{FETCH}\n{text}" for name, text in SCRIPTS.items()}, monkeypatch)
    (folder / "tag").write_text(f"{OLD}\n")
    return folder


def fetched(tools):
    path = tools / "fetched"
    return path.read_text().splitlines() if path.exists() else []


def files(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


@pytest.mark.parametrize(
    ("launcher", "suffix", "uri"),
    [("pyxis", "sqsh", f"docker://vllm/vllm-openai@{OLD}"), ("apptainer", "sif", f"docker://vllm/vllm-openai@{OLD}")],
)
def test_an_image_is_imported_by_its_digest_and_only_once(tools, tmp_path, launcher, suffix, uri):
    cluster, images = Cluster(launcher=launcher, images=str(tmp_path / "images")), tmp_path / "images"
    made = import_image(cluster, NAME, tmp_path / "results")
    assert fetched(tools) == [uri]
    assert files(images) == [f"vllm+vllm-openai@sha256-{'0a' * 32}.{suffix}"]
    assert Path(made.file).read_text() == "whole\n"
    assert find_image(cluster, NAME, tmp_path / "results") == made
    # Another checkout that shares the folder takes what is there.
    assert import_image(cluster, NAME, tmp_path / "others") == made
    assert fetched(tools) == [uri]


def test_a_moved_tag_is_another_image_beside_the_old_one(tools, tmp_path):
    cluster = Cluster(launcher="pyxis")
    before = import_image(cluster, NAME, tmp_path)
    (tools / "tag").write_text(NEW)
    after = import_image(cluster, NAME, tmp_path)
    assert (before.digest, after.digest) == (OLD, NEW)
    assert Path(before.file).exists()
    assert before.file != after.file
    assert find_image(cluster, NAME, tmp_path) == after


def test_a_name_with_a_digest_asks_nobody_what_it_stands_for(tools, tmp_path):
    (tools / "skopeo").unlink()
    made = import_image(Cluster(launcher="apptainer"), f"{NAME}@{NEW}", tmp_path)
    assert made.digest == NEW
    assert fetched(tools) == [f"docker://vllm/vllm-openai@{NEW}"]


def test_docker_keeps_the_image_itself_unless_other_nodes_need_it(tools, tmp_path):
    here = import_image(Cluster(launcher="docker"), NAME, tmp_path)
    assert (here.digest, here.file, fetched(tools)) == (OLD, None, [])
    slurm = Slurm(partition="gpu", time_limit_min=60)
    there = import_image(Cluster(launcher="docker", cores_per_point=8, slurm=slurm), NAME, tmp_path)
    assert Path(there.file).read_text() == "whole\n"
    assert fetched(tools) == [here.docker_id] == [there.docker_id]


@pytest.mark.parametrize("launcher", ["pyxis", "apptainer", "docker"])
def test_a_failed_import_is_an_image_pull_and_leaves_nothing(tools, tmp_path, launcher):
    (tools / "fail").touch()
    cluster = Cluster(launcher=launcher)
    with pytest.raises(AttemptFailed, match="manifest unknown") as caught:
        import_image(cluster, NAME, tmp_path)
    assert caught.value.failure_class == FailureClass.IMAGE_PULL
    assert not [path for path in tmp_path.glob("images/*") if path.suffix != ".lock"]
    with pytest.raises(AttemptFailed, match="has not been imported"):
        find_image(cluster, NAME, tmp_path)
    (tools / "fail").unlink()
    assert import_image(cluster, NAME, tmp_path).digest == OLD


def test_a_tool_that_is_not_there_is_named_with_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(AttemptFailed, match=r"skopeo is not on this machine.*name@sha256") as caught:
        import_image(Cluster(launcher="apptainer"), NAME, tmp_path)
    assert caught.value.failure_class == FailureClass.IMAGE_PULL


def test_a_registry_that_says_no_digest(tools, tmp_path):
    (tools / "tag").write_text("you are rate limited")
    with pytest.raises(AttemptFailed, match=rf"no digest of {NAME} in what the registry said: you are rate limited"):
        import_image(Cluster(launcher="pyxis"), NAME, tmp_path)


@pytest.mark.usefixtures("tools")
def test_an_image_whose_file_is_gone_says_how_to_get_it_back(tmp_path):
    cluster = Cluster(launcher="pyxis")
    Path(import_image(cluster, NAME, tmp_path).file).unlink()
    with pytest.raises(AttemptFailed, match=r"is gone; delete .*image\.json and run snakemake again"):
        find_image(cluster, NAME, tmp_path)


def test_services_that_run_without_an_image_need_none(tmp_path):
    assert find_image(Cluster(launcher="bare"), NAME, tmp_path) is None


def test_clusters_share_a_record_only_if_they_share_launcher_and_folder():
    clusters = [Cluster(launcher="pyxis"), Cluster(launcher="apptainer"), Cluster(launcher="pyxis", images="/i")]
    assert len({image_key(cluster, NAME) for cluster in clusters}) == 3
    assert len({image_key(clusters[0], name) for name in (NAME, "vllm/vllm:openai-v0.27.1")}) == 2


# ------------------------------------------------------------------------------------------------ as a program
@pytest.fixture
def checkout(tmp_path):
    """Return a checkout's results with two planned points that run in one image."""
    points = [planned_point(backend="none"), planned_point(backend="lmcache")]
    (tmp_path / "clusters.yaml").write_text(f"clusters:\n  {points[0].row.runner}:\n    launcher: apptainer\n")
    for point in points:
        point.write(tmp_path / "results/points" / f"{point.id}.json")
    (tmp_path / "results/plan.tsv").write_text(plan_tsv(points, set(), {}, ()))
    return tmp_path, points


def start(project, root, point):
    argv = [sys.executable, "-m", "workflow.images", str(root / "results/points" / f"{point.id}.json")]
    argv += ["--results", str(root / "results"), "--clusters", str(root / "clusters.yaml")]
    return subprocess.Popen(argv, cwd=project, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until_at_the_lock(process):
    """Return once a process has opened the lock file of an import."""
    while not any(link.resolve().suffix == ".lock" for link in Path(f"/proc/{process.pid}/fd").iterdir()):
        assert process.poll() is None
        time.sleep(0.01)


def test_two_at_once_import_once(project, tools, checkout):
    root, points = checkout
    os.mkfifo(tools / "hold")
    os.mkfifo(tools / "holding")
    first = start(project, root, points[0])
    (tools / "holding").read_text()  # the first one is in the middle of its fetch
    second = start(project, root, points[0])
    until_at_the_lock(second)
    (tools / "hold").write_text("\n")
    assert [process.wait(60) for process in (first, second)] == [0, 0]
    assert len(fetched(tools)) == 1
    shown = [Image.model_validate_json(process.stdout.read()) for process in (first, second)]
    assert shown[0] == shown[1]
    assert Path(shown[0].file).read_text() == "whole\n"


def test_after_a_kill_the_next_import_waits_for_the_tool_that_lives_on(project, tools, checkout):
    root, points = checkout
    os.mkfifo(tools / "hold")
    os.mkfifo(tools / "holding")
    first = start(project, root, points[0])
    (tools / "holding").read_text()
    first.kill()
    first.wait()
    (part,) = (root / "results/images").glob("*.part")
    second = start(project, root, points[0])
    # The tool of the first still writes; without its lock the second would fetch now.
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(2)
    assert len(fetched(tools)) == 1
    (tools / "hold").write_text("\n")
    (tools / "holding").read_text()
    (tools / "hold").write_text("\n")
    assert second.wait() == 0
    assert len(fetched(tools)) == 2
    assert not part.exists()


def test_a_failed_import_is_recorded_for_every_point_that_waits_for_it(project, tools, checkout):
    root, points = checkout
    (tools / "fail").touch()
    failed = start(project, root, points[0])
    assert failed.wait() == 1
    said = failed.stderr.read()
    assert said.startswith("image_pull: `apptainer pull ")
    assert "Traceback" not in said
    records = [Failure.read(path) for path in (root / "results/failures").glob("*.json")]
    assert {record.point for record in records} == {point.id for point in points}
    assert {record.failure_class for record in records} == {FailureClass.IMAGE_PULL}
    assert all(record.worth_retrying for record in records)


# ------------------------------------------------------------------------------------------------------- names
@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("ubuntu", ("ubuntu", None, None)),
        (NAME, ("vllm/vllm-openai", "v0.27.1", None)),
        ("nvcr.io#nvidia/tensorrt-llm/release:1.3.0rc14", ("nvcr.io/nvidia/tensorrt-llm/release", "1.3.0rc14", None)),
        ("reg:5000/x", ("reg:5000/x", None, None)),
        (f"reg:5000/x:1@{OLD}", ("reg:5000/x", "1", OLD)),
        (f"x@{OLD}", ("x", None, OLD)),
    ],
)
def test_a_name_in_its_parts(name, parts):
    found = Reference.parse(name)
    assert (found.repository, found.tag, found.digest) == parts


@pytest.mark.parametrize("name", ["", "Upper case", "x@sha256:short", "x:", "-x"])
def test_what_is_no_name(name):
    with pytest.raises(InputError, match="is not the name of an image; allowed"):
        Reference.parse(name)


@pytest.mark.parametrize(
    ("image", "named"),
    [
        ("vllm/vllm-openai:v1", "vllm/vllm-openai:v1"),
        ("ubuntu", "ubuntu"),
        ("nvcr.io/nvidia/x:1", "nvcr.io#nvidia/x:1"),
        ("localhost/x", "localhost#x"),
        ("reg:5000/x", "reg:5000#x"),
    ],
)
def test_registries_are_written_as_enroot_wants_them(image, named):
    assert enroot_name(image) == named
