"""What is started for a service in a container; rendered, since no machine has all of the launchers."""

import os
import subprocess
from pathlib import Path

import pytest

from workflow.config import Cluster
from workflow.contract import InputError
from workflow.launchers import Launcher, image_file, import_command, inside, pyxis_image

ARGV = ("vllm", "serve", "/models/m", "--port", "8000")
ENV = {"B": "2", "A": "one two"}
MARK = {"OFFLOAD_SWEEP_ATTEMPT": "job7-x"}
MOUNTS = ((Path("/models/m"), "ro"), (Path("/results/a"), "rw"))


def render(launcher, vendor="nvidia", image="vllm/vllm-openai:v0.27.1", **cluster):
    made = Launcher(Cluster(launcher=launcher, **cluster), image, vendor, MOUNTS)
    return made.command("engine", ARGV, ENV, ("LEAKED",), MARK)


def test_bare_is_the_command_itself():
    command = render("bare")
    assert (command.argv, dict(command.env), command.after) == (ARGV, ENV, ())


@pytest.mark.parametrize("launcher", ["pyxis", "apptainer", "docker"])
def test_variables_are_set_and_unset_inside_of_the_container(launcher):
    command = render(launcher)
    inner = ("-u", "LEAKED", "A=one two", "B=2", "OFFLOAD_SWEEP_ATTEMPT=job7-x", *ARGV)
    assert command.argv[-len(inner) :] == inner
    assert command.env == {}


def test_env_does_what_is_claimed_of_it():
    argv = inside(("sh", "-c", 'echo "$A ${LEAKED-gone}"'), {"A": "one two"}, ("LEAKED",))
    done = subprocess.run(argv, env={**os.environ, "LEAKED": "1"}, capture_output=True, text=True, check=True)
    assert done.stdout == "one two gone\n"


def test_pyxis():
    argv = render("pyxis", mounts=("/data",)).argv
    assert argv[0] == "srun"
    assert "--container-image=vllm/vllm-openai:v0.27.1" in argv
    assert "--container-mounts=/models/m:/models/m:ro,/results/a:/results/a:rw,/data:/data:ro" in argv
    assert "--overlap" in argv  # else the step waits for the batch step that waits for it
    assert argv[argv.index("env") - 1].startswith("--")


def test_apptainer():
    argv = render("apptainer").argv
    assert argv[:2] == ("apptainer", "exec")
    binds = [argv[i + 1] for i, word in enumerate(argv) if word == "--bind"]
    assert binds == ["/models/m:/models/m:ro", "/results/a:/results/a:rw"]
    assert "--nv" in argv
    assert "--rocm" in render("apptainer", vendor="amd").argv
    assert not {"--nv", "--rocm"} & set(render("apptainer", vendor="none").argv)
    assert argv[argv.index("env") - 1] == "docker://vllm/vllm-openai:v0.27.1"


def test_docker_is_seen_from_outside_and_removed_by_name():
    command = render("docker")
    assert {"--network=host", "--pid=host", "--ipc=host", "--gpus=all", "--name=job7-x-engine"} <= set(command.argv)
    assert f"--user={os.getuid()}:{os.getgid()}" in command.argv
    assert command.argv[command.argv.index("--entrypoint=env") + 1] == "vllm/vllm-openai:v0.27.1"
    assert command.after == ("docker", "rm", "--force", "job7-x-engine")
    assert "--device=/dev/kfd" in render("docker", vendor="amd").argv


@pytest.mark.parametrize(("launcher", "suffix"), [("pyxis", "sqsh"), ("apptainer", "sif")])
def test_an_imported_image_is_used_and_a_missing_one_refused_with_the_command_to_run(launcher, suffix, tmp_path):
    with pytest.raises(InputError, match=rf"(?s)has not been imported.*flock .*\.{suffix}\.lock"):
        render(launcher, images=str(tmp_path))
    path = tmp_path / f"vllm+vllm-openai@v0.27.1.{suffix}"
    path.write_text("")
    assert any(str(path) in word for word in render(launcher, images=str(tmp_path)).argv)


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
    assert pyxis_image(image) == named


def test_two_images_never_share_a_file():
    images = ["a/b:c", "a:b/c", "a+b:c", "a/b@c", "a_b_c"]
    assert len({image_file(image) for image in images}) == len(images)
    assert all("/" not in image_file(image) for image in images)


def test_an_import_waits_for_another_one_and_leaves_no_half_image(tmp_path):
    path = tmp_path / "x.sif"
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "apptainer").write_text('#!/bin/sh\necho pulled >> calls; echo image > "$2"\n')
    (tools / "apptainer").chmod(0o755)
    argv = ["sh", "-c", import_command("apptainer", "a/b:c", path)]
    env = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    both = [subprocess.Popen(argv, cwd=tmp_path, env=env) for _ in range(2)]
    assert [one.wait() for one in both] == [0, 0]
    assert (tmp_path / "calls").read_text() == "pulled\n"
    assert path.read_text() == "image\n"
    assert not path.with_name("x.sif.part").exists()
