"""How a service's command is started on a node: as it is, or in its image by pyxis, Apptainer or Docker. Pure.

The image's command runs under `env`, which sets and unsets variables inside: an image's own ENV would win otherwise,
and a variable that is not to be inherited would come back.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from workflow.config import Cluster
from workflow.contract import InputError


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
    image: str
    vendor: str
    """`nvidia`, `amd` or `none`: which devices a container is given."""
    mounts: tuple[tuple[Path, str], ...] = ()
    """(folder, `ro` or `rw`), at the same place inside."""

    def command(
        self, name: str, argv: tuple[str, ...], env: Mapping[str, str], unset: tuple[str, ...], token: Mapping[str, str]
    ) -> Command:
        """Return how to start a service; `token` marks its processes, also inside of a container.

        Raises InputError where the image has not been imported.
        """
        kind = self.cluster.launcher
        if kind == "bare":
            return Command(argv, env)
        inner = inside(argv, {**env, **token}, unset)
        if kind == "pyxis":
            return Command((*self._pyxis(), *inner), {}, contained=True)
        if kind == "apptainer":
            return Command((*self._apptainer(), *inner), {})
        container = "-".join((*token.values(), name))
        return Command(
            (*self._docker(container), *inner[1:]), {}, after=("docker", "rm", "--force", container), contained=True
        )

    def _pyxis(self) -> tuple[str, ...]:
        mounts = ",".join(f"{path}:{path}:{mode}" for path, mode in self._mounts())
        return (
            *("srun", "--overlap", "--nodes=1", "--ntasks=1", "--export=ALL", "--kill-on-bad-exit=1"),
            f"--container-image={self._imported('sqsh') or pyxis_image(self.image)}",
            *((f"--container-mounts={mounts}",) if mounts else ()),
            *("--no-container-mount-home", "--no-container-entrypoint", "--container-writable"),
        )

    def _apptainer(self) -> tuple[str, ...]:
        binds = tuple(word for path, mode in self._mounts() for word in ("--bind", f"{path}:{path}:{mode}"))
        devices = {"nvidia": ("--nv",), "amd": ("--rocm",)}.get(self.vendor, ())
        image = self._imported("sif") or f"docker://{self.image}"
        return ("apptainer", "exec", "--cleanenv", "--no-home", "--writable-tmpfs", *devices, *binds, image)

    def _docker(self, container: str) -> tuple[str, ...]:
        devices = {
            "nvidia": ("--gpus=all",),
            "amd": ("--device=/dev/kfd", "--device=/dev/dri", "--group-add=video", "--group-add=render"),
        }.get(self.vendor, ())
        return (
            *("docker", "run", "--rm", "--init", f"--name={container}"),
            # The host's network, processes and shared memory: ports and marks are then seen from outside.
            *("--network=host", "--pid=host", "--ipc=host", f"--user={os.getuid()}:{os.getgid()}"),
            *("--ulimit=memlock=-1", "--ulimit=nofile=1048576", "--cap-add=IPC_LOCK", *devices),
            *(f"--volume={path}:{path}:{mode}" for path, mode in self._mounts()),
            *("--entrypoint=env", self.image),
        )

    def _mounts(self) -> tuple[tuple[str, str], ...]:
        own = [(str(path), mode) for path, mode in self.mounts]
        return (*own, *((path, "ro") for path in self.cluster.mounts))

    def _imported(self, suffix: str) -> str | None:
        """Return the imported image; None where the cluster names no folder of them."""
        if self.cluster.images is None:
            return None
        path = Path(self.cluster.images) / f"{image_file(self.image)}.{suffix}"
        if not path.is_file():
            raise InputError(
                f"image {self.image} has not been imported",
                file=path,
                do=f"import it once: {import_command(self.cluster.launcher, self.image, path)}",
            )
        return str(path)


def inside(argv: tuple[str, ...], env: Mapping[str, str], unset: tuple[str, ...]) -> tuple[str, ...]:
    """Return `env ... argv`: the command with its variables set and unset inside of the container."""
    without = tuple(word for name in unset for word in ("-u", name))
    return ("env", *without, *(f"{name}={value}" for name, value in sorted(env.items())), *argv)


def image_file(image: str) -> str:
    """Return an image's name as that of a file; two images never share one."""
    return re.sub(r"[^A-Za-z0-9._-]", lambda found: {"/": "+", ":": "@"}.get(found[0], "_"), image)


def pyxis_image(image: str) -> str:
    """Return an image as enroot names it: `#` stands between a registry and the rest."""
    host, slash, rest = image.partition("/")
    registry = bool(slash) and ("." in host or ":" in host or host == "localhost")
    return f"{host}#{rest}" if registry else image


def import_command(launcher: str, image: str, path: Path) -> str:
    """Return the shell command that imports an image under a lock: parallel imports damage each other's files."""
    fetch = {
        "pyxis": f"enroot import --output {path}.part docker://{pyxis_image(image)}",
        "apptainer": f"apptainer pull {path}.part docker://{image}",
    }[launcher]
    return f"flock {path}.lock sh -c '[ -e {path} ] || {{ {fetch} && mv {path}.part {path}; }}'"
