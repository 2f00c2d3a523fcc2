"""How a service's command is started on a node: as it is, or in its image by pyxis, Apptainer or Docker. Pure.

The image's command runs under `env`, which sets and unsets variables inside: an image's own ENV would win otherwise,
and a variable that is not to be inherited would come back.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from workflow.config import Cluster
from workflow.images import Image

# Docker's store is of one machine: a node that has not seen the image reads it from the archive.
_LOAD = 'docker image inspect "$0" >/dev/null 2>&1 || docker load --quiet --input "$1" >&2 || exit; shift; exec "$@"'


@dataclass(frozen=True)
class Command:
    """What is started for a service."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    """Variables of the started process itself."""
    after: tuple[str, ...] = ()
    """Command that ends what the process leaves with a daemon; run after every stop."""
    contained: bool = False
    """The service is started by a daemon, and is no descendant of the process."""


@dataclass(frozen=True)
class Launcher:
    """A cluster's way to start a service in the image of a point."""

    cluster: Cluster
    image: Image | None
    """None: services are started as they are."""
    vendor: str
    """`nvidia`, `amd` or `none`: which devices a container is given."""
    mounts: tuple[tuple[Path, str], ...] = ()
    """(folder, `ro` or `rw`), at the same place inside."""

    def command(
        self, name: str, argv: tuple[str, ...], env: Mapping[str, str], unset: tuple[str, ...], token: Mapping[str, str]
    ) -> Command:
        """Return how to start a service; `token` marks its processes, also inside of a container."""
        image = self.image
        if image is None:
            return Command(argv, env)
        inner = inside(argv, {**env, **token}, unset)
        if image.launcher == "pyxis":
            return Command((*self._pyxis(image), *inner), {}, contained=True)
        if image.launcher == "apptainer":
            return Command((*self._apptainer(image), *inner), {})
        container = "-".join((*token.values(), name))
        return Command(
            (*self._docker(image, container), *inner[1:]),
            {},
            after=("docker", "rm", "--force", container),
            contained=True,
        )

    def _pyxis(self, image: Image) -> tuple[str, ...]:
        mounts = ",".join(f"{path}:{path}:{mode}" for path, mode in self._mounts())
        return (
            *("srun", "--overlap", "--nodes=1", "--ntasks=1", "--export=ALL", "--kill-on-bad-exit=1"),
            f"--container-image={image.file}",
            *((f"--container-mounts={mounts}",) if mounts else ()),
            *("--no-container-mount-home", "--no-container-entrypoint", "--container-writable"),
        )

    def _apptainer(self, image: Image) -> tuple[str, ...]:
        binds = tuple(word for path, mode in self._mounts() for word in ("--bind", f"{path}:{path}:{mode}"))
        devices = {"nvidia": ("--nv",), "amd": ("--rocm",)}.get(self.vendor, ())
        fixed = ("apptainer", "exec", "--cleanenv", "--no-home", "--writable-tmpfs")
        return (*fixed, *devices, *binds, str(image.file))

    def _docker(self, image: Image, container: str) -> tuple[str, ...]:
        devices = {
            "nvidia": ("--gpus=all",),
            "amd": ("--device=/dev/kfd", "--device=/dev/dri", "--group-add=video", "--group-add=render"),
        }.get(self.vendor, ())
        loaded = () if image.file is None else ("sh", "-c", _LOAD, str(image.docker_id), image.file)
        return (
            *loaded,
            *("docker", "run", "--rm", "--init", f"--name={container}"),
            # The host's network, processes and shared memory: ports and marks are then seen from outside.
            *("--network=host", "--pid=host", "--ipc=host", f"--user={os.getuid()}:{os.getgid()}"),
            *("--ulimit=memlock=-1", "--ulimit=nofile=1048576", "--cap-add=IPC_LOCK", *devices),
            *(f"--volume={path}:{path}:{mode}" for path, mode in self._mounts()),
            *("--entrypoint=env", str(image.docker_id)),
        )

    def _mounts(self) -> tuple[tuple[str, str], ...]:
        own = [(str(path), mode) for path, mode in self.mounts]
        return (*own, *((path, "ro") for path in self.cluster.mounts))


def inside(argv: tuple[str, ...], env: Mapping[str, str], unset: tuple[str, ...]) -> tuple[str, ...]:
    """Return `env ... argv`: the command with its variables set and unset inside of the container."""
    without = tuple(word for name in unset for word in ("-u", name))
    return ("env", *without, *(f"{name}={value}" for name, value in sorted(env.items())), *argv)
