"""Container images, fetched on a CPU before a GPU is allocated: `python -m workflow.images POINT`.

An image lies under its digest, so a tag that was moved is another file, beside the one that earlier points ran in.
Imports of one image take turns: two at once damage each other's files, and cost twice the traffic.
"""

import argparse
import contextlib
import csv
import fcntl
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from workflow import yamlfile
from workflow.config import Cluster, Clusters
from workflow.contract import Document, InputError, digest
from workflow.failures import WORTH_RETRYING, AttemptFailed, Failure, FailureClass
from workflow.points import Point, slug

SUFFIX = {"pyxis": "sqsh", "apptainer": "sif", "docker": "tar"}
"""Launcher -> what its image files are called."""
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_NAME = re.compile(rf"([a-z0-9](?:[\w./:-]*?\w)?)(?::([\w][\w.-]*))?(?:@({_DIGEST.pattern}))?")


class Image(Document):
    """An imported image, results/images/<key>/image.json."""

    launcher: str
    name: str
    """As the search space names it."""
    digest: str
    """Of its manifest, `sha256:<64 hex digits>`: what the name stood for when it was imported."""
    file: str | None
    """The image itself. None: it is in Docker's own store on this machine."""
    docker_id: str | None
    """What Docker calls it; a name would be looked up again, and could have moved."""


@dataclass(frozen=True)
class Reference:
    """An image's name in its parts; enroot's `registry#image` is understood too."""

    repository: str
    """With the registry, if one is named."""
    tag: str | None
    digest: str | None

    @classmethod
    def parse(cls, name: str) -> "Reference":
        """Split a name; raises InputError if it is none."""
        found = re.fullmatch(
            r"([a-z0-9](?:[\w./:-]*?\w)?)(?::([\w][\w.-]*))?(?:@(sha256:[0-9a-f]{64}))?", name.replace("#", "/")
        )
        if found is None:
            raise InputError(f"{name!r} is not the name of an image", allowed="[registry/]name[:tag][@sha256:...]")
        return cls(found[1], found[2], found[3])

    @property
    def tagged(self) -> str:
        """Return the name to ask a registry for."""
        return f"{self.repository}:{self.tag or 'latest'}"

    def pinned(self, digest: str) -> str:
        """Return the name that can only mean one image; tools take a tag or a digest, and not both."""
        return f"{self.repository}@{digest}"


def folder_of(cluster: Cluster, results: Path) -> Path:
    """Return where a cluster's images are kept."""
    return Path(cluster.images) if cluster.images is not None else results / "images"


def image_key(cluster: Cluster, name: str) -> str:
    """Return the folder name of an image's record: one for each image, launcher and place where images are kept."""
    parts = {"launcher": cluster.launcher, "name": name, "images": cluster.images, "archived": _archived(cluster)}
    return f"{slug(name)}-{digest(parts, 8)}"


def _archived(cluster: Cluster) -> bool:
    """Tell whether the image becomes a file: Docker's store is of one machine only, so other nodes need an archive."""
    return cluster.launcher != "docker" or cluster.slurm is not None


def find_image(cluster: Cluster, name: str, results: Path) -> Image | None:
    """Return the imported image of a point; None where its services run without one.

    Raises AttemptFailed(configuration) with what to do if it has not been imported, or its file is gone.
    """
    if cluster.launcher == "bare":
        return None
    record = results / "images" / image_key(cluster, name) / "image.json"
    if not record.exists():
        says = f"image {name} has not been imported; snakemake does it, or by hand: python -m workflow.images POINT"
        raise AttemptFailed(FailureClass.CONFIGURATION, says)
    try:
        image = Image.read(record)
    except InputError as error:
        raise AttemptFailed(FailureClass.CONFIGURATION, f"{error}; delete it and run snakemake again") from None
    if image.file is not None and not Path(image.file).is_file():
        says = f"{image.file}, the image {name}, is gone; delete {record} and run snakemake again"
        raise AttemptFailed(FailureClass.CONFIGURATION, says)
    return image


# -------------------------------------------------------------------------------------------------- the import
def import_image(cluster: Cluster, name: str, results: Path) -> Image:
    """Import an image, unless its digest is already there, and write its record.

    Raises AttemptFailed(image_pull) with the end of the tool's message; nothing is left of an import that failed.
    """
    reference = Reference.parse(name)
    tool = _TOOLS[cluster.launcher]
    found = reference.digest or tool.digest(reference)
    file: Path | None = None
    if _archived(cluster):
        folder = folder_of(cluster, results)
        folder.mkdir(parents=True, exist_ok=True)
        stem = reference.repository.replace("/", "+").replace(":", "_")
        file = (folder / f"{stem}@{found.replace(':', '-')}.{SUFFIX[cluster.launcher]}").resolve()
        with _turn(file):
            if not file.exists():
                _fetch_into(file, lambda part: tool.fetch(reference.pinned(found), part))
    elif cluster.launcher == "docker":
        tool.fetch(reference.pinned(found), None)
    image = Image(
        schema_version=Image.SCHEMA_VERSION,
        launcher=cluster.launcher,
        name=name,
        digest=found,
        file=None if file is None else str(file),
        docker_id=_docker_id(reference.pinned(found)) if cluster.launcher == "docker" else None,
    )
    image.write(results / "images" / image_key(cluster, name) / "image.json")
    return image


@contextlib.contextmanager
def _turn(file: Path) -> Iterator[None]:
    """Wait until nobody else imports this file. The lock ends with its last holder, however that ends."""
    with file.with_name(f"{file.name}.lock").open("a") as lock:
        # The tools inherit it: one that outlives us, if we are killed, still writes to the file.
        os.set_inheritable(lock.fileno(), True)
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetch_into(file: Path, fetch: Callable[[Path], None]) -> None:
    """Make a file whole or not at all. The caller holds its lock, so a part that is there is a killed import's."""
    part = file.with_name(f"{file.name}.part")
    part.unlink(missing_ok=True)
    try:
        fetch(part)
        if not part.is_file() or not part.stat().st_size:
            raise AttemptFailed(FailureClass.IMAGE_PULL, f"the import ended well and made no {part.name}")
        with part.open("rb") as stream:
            os.fsync(stream.fileno())
        part.rename(file)
    finally:
        part.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Tool:
    """How a launcher's own tools look an image up and fetch it."""

    digest: Callable[[Reference], str]
    fetch: Callable[[str, Path | None], None]
    """(pinned name, file to write)."""


def _enroot_digest(reference: Reference) -> str:
    return _digest_in(_run("enroot", "digest", f"docker://{enroot_name(reference.tagged)}"), reference)


def _enroot_fetch(pinned: str, part: Path | None) -> None:
    _run("enroot", "import", "--output", str(part), f"docker://{enroot_name(pinned)}")


def _apptainer_digest(reference: Reference) -> str:
    # Apptainer itself does not say which digest a tag stands for.
    shown = _run("skopeo", "inspect", "--no-tags", "--format", "{{.Digest}}", f"docker://{reference.tagged}")
    return _digest_in(shown, reference)


def _apptainer_fetch(pinned: str, part: Path | None) -> None:
    _run("apptainer", "pull", str(part), f"docker://{pinned}")


def _docker_digest(reference: Reference) -> str:
    _run("docker", "pull", "--quiet", reference.tagged)
    shown = _run("docker", "image", "inspect", "--format", '{{join .RepoDigests "\\n"}}', reference.tagged)
    # An image that was also pulled from a mirror has that one's digest too, under which this registry knows nothing.
    own = [line for line in shown.splitlines() if line.startswith(f"{reference.repository}@")]
    return _digest_in("\n".join(own or shown.splitlines()), reference)


def _docker_fetch(pinned: str, part: Path | None) -> None:
    _run("docker", "pull", "--quiet", pinned)
    if part is not None:
        _run("docker", "save", "--output", str(part), _docker_id(pinned))


def _docker_id(pinned: str) -> str:
    return _run("docker", "image", "inspect", "--format", "{{.Id}}", pinned).strip()


_TOOLS: Mapping[str, _Tool] = {
    "pyxis": _Tool(_enroot_digest, _enroot_fetch),
    "apptainer": _Tool(_apptainer_digest, _apptainer_fetch),
    "docker": _Tool(_docker_digest, _docker_fetch),
}


def enroot_name(name: str) -> str:
    """Return an image as enroot names it: `#` stands between a registry and the rest."""
    host, slash, rest = name.partition("/")
    registry = bool(slash) and ("." in host or ":" in host or host == "localhost")
    return f"{host}#{rest}" if registry else name


def _digest_in(text: str, reference: Reference) -> str:
    found = _DIGEST.search(text)
    if found is None:
        says = f"no digest of {reference.tagged} in what the registry said: {text.strip() or 'nothing'}"
        raise AttemptFailed(FailureClass.IMAGE_PULL, says)
    return found[0]


def _run(*argv: str) -> str:
    try:
        # Files of ours are closed all the same, except the lock of `_turn`.
        done = subprocess.run(argv, capture_output=True, text=True, check=False, close_fds=False)
    except FileNotFoundError:
        says = f"{argv[0]} is not on this machine; import the image where it is: python -m workflow.images POINT"
        if argv[0] == "skopeo":
            says += "; an image named by its digest, name@sha256:..., needs no skopeo"
        raise AttemptFailed(FailureClass.IMAGE_PULL, says) from None
    if done.returncode:
        tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-8:])
        raise AttemptFailed(FailureClass.IMAGE_PULL, f"`{' '.join(argv)}` failed:\n{tail}")
    return done.stdout


# -------------------------------------------------------------------------------------------------- command line
def waiting_points(results: Path, runner: str, name: str) -> list[str]:
    """Return the planned points that wait for an image on a cluster."""
    plan = results / "plan.tsv"
    if not plan.exists():
        return []
    with plan.open(newline="") as stream:
        rows = [row for row in csv.DictReader(stream, delimiter="\t") if row["state"] == "to measure"]
    ids = [row["point"] for row in rows if row["cluster"] == runner]
    return [point for point in ids if Point.read(results / "points" / f"{point}.json").row.image == name]


def record_failure(error: AttemptFailed, point: Point, results: Path) -> None:
    """Write a record for every point that cannot be measured without the image."""
    attempt = f"image-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}"
    for name in sorted({point.id, *waiting_points(results, point.row.runner, point.row.image)}):
        Failure(
            schema_version=Failure.SCHEMA_VERSION,
            point=name,
            attempt=attempt,
            failure_class=error.failure_class,
            message=error.message,
            first_cause=None,
            worth_retrying=error.failure_class in WORTH_RETRYING,
            unix_s=time.time(),
            logs=(),
        ).write(results / "failures" / f"{name}.{attempt}.json")


def cluster_of(point: Point, file: Path) -> Cluster:
    """Return the cluster of a point's runner; raises InputError if the file does not name it."""
    known = yamlfile.validate(Clusters, yamlfile.load(file), file).clusters
    if point.row.runner not in known:
        raise InputError(
            f"runner {point.row.runner!r} is not listed", file=file, key="clusters", allowed=", ".join(sorted(known))
        )
    return known[point.row.runner]


def main(arguments: list[str] | None = None) -> int:
    """Import the image of a point; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m workflow.images", description="Import the container image of a point."
    )
    parser.add_argument("point", type=Path, help="a point file, results/points/<id>.json")
    parser.add_argument("--results", type=Path, default=Path("results"), help="where the image is recorded")
    parser.add_argument("--clusters", type=Path, default=Path("configs/clusters.yaml"), help="which launcher it is for")
    options = parser.parse_args(arguments)
    try:
        point = Point.read(options.point)
        cluster = cluster_of(point, options.clusters)
        if cluster.launcher == "bare":
            raise InputError(f"{point.row.runner} starts services as they are, without an image", file=options.clusters)
        print(import_image(cluster, point.row.image, options.results).to_json())
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    except AttemptFailed as error:
        record_failure(error, point, options.results)
        print(f"{error.failure_class}: {error.message}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
