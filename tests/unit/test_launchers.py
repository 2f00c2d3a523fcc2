"""What is started for a service in a container; rendered, since no machine has all of the launchers."""

import os
import subprocess
from pathlib import Path

import pytest

from workflow.config import Cluster
from workflow.images import Image
from workflow.launchers import Launcher, inside

ARGV = ("vllm", "serve", "/models/m", "--port", "8000")
ENV = {"B": "2", "A": "one two"}
MARK = {"OFFLOAD_SWEEP_ATTEMPT": "job7-x"}
MOUNTS = ((Path("/models/m"), "ro"), (Path("/results/a"), "rw"))


ID = "sha256:" + "1d" * 32


def render(launcher, vendor="nvidia", file=None, **cluster):
    image = Image(
        schema_version=1,
        launcher=launcher,
        name="vllm/vllm-openai:v0.27.1",
        digest="sha256:" + "ab" * 32,
        file=file,
        docker_id=ID if launcher == "docker" else None,
    )
    made = Launcher(Cluster(launcher=launcher, **cluster), None if launcher == "bare" else image, vendor, MOUNTS)
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
    argv = render("pyxis", file="/images/x.sqsh", mounts=("/data",)).argv
    assert argv[0] == "srun"
    assert "--container-image=/images/x.sqsh" in argv
    assert "--container-mounts=/models/m:/models/m:ro,/results/a:/results/a:rw,/data:/data:ro" in argv
    assert "--overlap" in argv  # else the step waits for the batch step that waits for it
    assert argv[argv.index("env") - 1].startswith("--")


def test_apptainer():
    argv = render("apptainer", file="/images/x.sif").argv
    assert argv[:2] == ("apptainer", "exec")
    binds = [argv[i + 1] for i, word in enumerate(argv) if word == "--bind"]
    assert binds == ["/models/m:/models/m:ro", "/results/a:/results/a:rw"]
    assert "--nv" in argv
    assert "--rocm" in render("apptainer", vendor="amd").argv
    assert not {"--nv", "--rocm"} & set(render("apptainer", vendor="none").argv)
    assert argv[argv.index("env") - 1] == "/images/x.sif"


def test_docker_is_seen_from_outside_and_removed_by_name():
    command = render("docker")
    assert {"--network=host", "--pid=host", "--ipc=host", "--gpus=all", "--name=job7-x-engine"} <= set(command.argv)
    assert f"--user={os.getuid()}:{os.getgid()}" in command.argv
    assert command.argv[command.argv.index("--entrypoint=env") + 1] == ID
    assert command.after == ("docker", "rm", "--force", "job7-x-engine")
    assert "--device=/dev/kfd" in render("docker", vendor="amd").argv


def test_a_node_that_has_not_seen_the_image_loads_its_archive_once(tmp_path):
    """Docker's store is of one machine; the command is run with a docker that only says what it was asked."""
    (tmp_path / "docker").write_text(
        '#!/bin/sh\necho "$*" >> "$0.calls"\ncase "$1" in image) test -e "$0.loaded";; load) touch "$0.loaded";; esac\n'
    )
    (tmp_path / "docker").chmod(0o755)
    argv = render("docker", file="/images/x.tar").argv
    for _ in range(2):
        subprocess.run(argv, env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}, check=True)
    first, load, run, second, again = (tmp_path / "docker.calls").read_text().splitlines()
    assert (first, second) == (f"image inspect {ID}", f"image inspect {ID}")
    assert load == "load --quiet --input /images/x.tar"
    assert run == again
    assert run.startswith("run --rm")
    assert f"--entrypoint=env {ID} -u LEAKED" in run
