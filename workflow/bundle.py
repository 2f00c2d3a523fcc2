"""What a GPU node without a network needs to measure planned points, in parts that can be carried to it one by one.

`python -m workflow.bundle --configfile FILE --engine vllm --node NODE.yaml --out .bundle` plans the points, makes their
sessions and models, downloads the wheels of their environments less what the node has, packs all of it and cuts it into
parts. The checkout itself is not in it. On the node `workflow/unbundle.py` installs what has arrived.
"""

import argparse
import fnmatch
import hashlib
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from workflow import yamlfile
from workflow.config import load_config
from workflow.contract import Document, InputError, Strict, digest, file_sha256, reports_input_errors, write_atomic
from workflow.environments import normalised, pins, wheel_folders
from workflow.models import GGUF, served_from
from workflow.parts import prepare_model, prepare_traces
from workflow.points import Point
from workflow.replay import CORPUS
from workflow.sweep import Sweep, plan_sweep
from workflow.unbundle import MANIFEST, OWN_ENVIRONMENT

PART_BYTES = 60_000_000
OWN_ARCHIVE_BYTES = 32_000_000
"""A wheel from this size on is an archive of its own: archives are compressed once and unpacked side by side."""
EPOCH = (1980, 1, 1, 0, 0, 0)
"""Time of every file: the same content gives the same bytes, and a part that the node has need not be carried again."""


class Node(Strict):
    """What a node has, as `python3 -m workflow.unbundle --describe` prints it there, and what need not be carried."""

    python: Annotated[str, Field(pattern=r"^3\.\d+\.\d+$")]
    glibc: Annotated[str, Field(pattern=r"^2\.\d+$")]
    packages: dict[str, str]
    """Distributions of the node's own Python -> version."""
    trim: dict[str, tuple[str, ...]] = {}
    """Distribution -> patterns of files in its wheel that no point needs on this node."""


class Part(Strict):
    """A file to carry."""

    file: str
    bytes: int
    sha256: str


class Archive(Strict):
    """A compressed tar inside of the parts, read as one stream."""

    name: str
    holds: Literal["wheels", "tree"]
    """`tree` is laid over the checkout."""
    offset: int
    bytes: int
    sha256: str


class BundledEnvironment(Strict):
    """An environment to make on the node."""

    name: str
    key: str
    packages: dict[str, str]
    """All that the lock pins, the node's own included."""
    wheels: tuple[str, ...]
    of_the_node: dict[str, str]
    """What the lock pins and the node has: it must be there in this version."""
    trimmed: dict[str, tuple[str, ...]]


class Bundle(Document):
    """`bundle.json`: what the parts hold, for the installer."""

    python: str
    parts: tuple[Part, ...]
    archives: tuple[Archive, ...]
    environments: tuple[BundledEnvironment, ...]
    points: tuple[str, ...]


# ------------------------------------------------------------------------------------------------ what to carry
def split_lock(lock: Path, node: Node) -> tuple[dict[str, str], dict[str, str]]:
    """Return (what is carried, what is left to the node) of a lock, name -> version.

    Only the very version is left to the node: a lock for a node is resolved with the node's versions given, and where
    it pins another one it means it.
    """
    have = {normalised(name): version for name, version in node.packages.items()}
    pinned = pins(lock)
    left = {name: version for name, version in pinned.items() if have.get(name) == version}
    return {name: version for name, version in pinned.items() if name not in left}, left


def points_of(sweep: Sweep, engine: str) -> list[Point]:
    """Return the sweep's points of an engine that preflight lets through; raises InputError if there are none."""
    points = [point for point in sweep.points.values() if point.row.framework == engine]
    if not points:
        engines = sorted({point.row.framework for point in sweep.points.values()})
        raise InputError(f"no planned point is served by engine {engine!r}", allowed=", ".join(engines) or "none")
    return [point for point in points if point.id not in sweep.doomed]


def locks_of(points: Iterable[Point], sweep: Sweep) -> dict[str, Path]:
    """Return name -> lock of the environments that points use, and of the one that runs them."""
    names = {name for point in points for name in point.environments} | {OWN_ENVIRONMENT}
    known = {path.stem: path for path in sweep.locks.values()}
    if missing := sorted(names - known.keys()):
        raise InputError(
            f"no lock of environment {', '.join(missing)}",
            file=sweep.config.environments,
            allowed=", ".join(sorted(known)),
            do="add it: docs/first-sweep.md, A node without a network",
        )
    return {name: known[name] for name in sorted(names)}


# --------------------------------------------------------------------------------------------------- the wheels
def download(carried: Mapping[str, str], node: Node, folder: Path, own: Iterable[Path] = ()) -> dict[str, Path]:
    """Download the wheels of some pins for the node into `folder`, unless they are there; return name -> wheel.

    What is in one of the `own` folders is taken from there. Raises InputError with the end of pip's message, also for
    a distribution that has no wheel for the node.
    """
    folder.mkdir(parents=True, exist_ok=True)
    places = (*own, folder)
    wanted = {name: version for name, version in carried.items() if _wheel_of(name, version, places) is None}
    if wanted:
        minor = int(node.glibc.partition(".")[2])
        platforms = [f"manylinux_2_{number}_x86_64" for number in range(5, minor + 1)]
        platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]
        argv = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        argv += ["--only-binary=:all:", "--implementation", "cp", "--python-version", node.python.rpartition(".")[0]]
        argv += [word for name in platforms for word in ("--platform", name)]
        argv += ["--dest", str(folder), *(f"{name}=={version}" for name, version in wanted.items())]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            tail = "\n".join(line for line in done.stderr.splitlines() if not line.startswith("WARNING"))
            raise InputError(
                f"pip cannot download {len(wanted)} wheels: {tail[-1500:]}",
                do="mend the lock's pins, or put a wheel of your own into a folder that it names with --find-links",
            )
    found = {name: _wheel_of(name, version, places) for name, version in carried.items()}
    return {name: wheel for name, wheel in found.items() if wheel is not None}


def _wheel_of(name: str, version: str, folders: Iterable[Path]) -> Path | None:
    for wheel in (wheel for folder in folders for wheel in sorted(folder.glob("*.whl"))):
        owner, its_version = wheel.name.split("-")[:2]
        if normalised(owner) == name and its_version == version:
            return wheel
    return None


def repack(wheel: Path, patterns: tuple[str, ...], target: Path) -> None:
    """Copy a wheel without compression and without the files that match, so that xz sees what is in it.

    Raises InputError for a pattern that matches nothing: it was written for another version.
    """
    with zipfile.ZipFile(wheel) as source:
        names = [info.filename for info in source.infolist() if not info.is_dir()]
        for pattern in patterns:
            if not fnmatch.filter(names, pattern):
                raise InputError(f"nothing in {wheel.name} matches {pattern!r}", key="trim", do="take the pattern out")
        dropped = {name for pattern in patterns for name in fnmatch.filter(names, pattern)}
        record = next(name for name in names if re.fullmatch(r"[^/]+\.dist-info/RECORD", name))
        with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as stored:
            for info in sorted(source.infolist(), key=lambda info: info.filename):
                if info.is_dir() or info.filename in dropped:
                    continue
                data = source.read(info)
                if info.filename == record:
                    data = _without(data.decode(), dropped).encode()
                kept = zipfile.ZipInfo(info.filename, EPOCH)
                kept.external_attr = info.external_attr
                stored.writestr(kept, data)


def _without(record: str, dropped: set[str]) -> str:
    """Return a wheel's RECORD without the lines of some files."""
    return "".join(line for line in record.splitlines(keepends=True) if line.split(",")[0].strip('"') not in dropped)


# ------------------------------------------------------------------------------------------------------- inputs
def write_inputs(points: Iterable[Point], sweep: Sweep, client_wheels: Mapping[str, Path], folder: Path) -> None:
    """Write points, sessions and made models below `folder`/results, as the rules would; what is there stays."""
    results = folder / "results"
    for point in points:
        write_atomic(results / "points" / f"{point.id}.json", point.to_json().encode(), durable=False)
        sessions = results / "traces" / point.trace.key
        if not (sessions / "trace_set.json").exists():
            prepare_traces(point, Path(sweep.config.traces), sessions)
        if point.made_model is None:
            continue
        model = results / "models" / point.model_key
        if not (model / "model.json").exists():
            corpus = folder.parent / "corpus.txt"
            with zipfile.ZipFile(client_wheels[point.replay.client]) as wheel:
                corpus.write_bytes(wheel.read(CORPUS))
            prepare_model(point, corpus, model)


# ------------------------------------------------------------------------------------------ archives and parts
@dataclass(frozen=True)
class Content:
    """What goes into one archive: name inside of it -> file."""

    name: str
    holds: Literal["wheels", "tree"]
    files: Mapping[str, Path]


def contents_of(inputs: Path, wheels: Mapping[str, Path], engine: str) -> list[Content]:
    """Return the archives in the order they are carried: what is small and needed first, large distributions last.

    Two versions of a distribution share an archive, since they share most of their bytes. Of a made model only what
    the engine loads is carried.
    """
    files = [path for path in sorted(inputs.rglob("*")) if path.is_file()]
    loaded = [path for path in files if path.name != GGUF or served_from(path.parent, engine) == path]
    tree = {str(path.relative_to(inputs)): path for path in loaded}
    owned: dict[str, dict[str, Path]] = {}
    for name, path in sorted(wheels.items()):
        owned.setdefault(name.split("-")[0], {})[name] = path
    large = {
        owner: files
        for owner, files in owned.items()
        if sum(path.stat().st_size for path in files.values()) >= OWN_ARCHIVE_BYTES
    }
    small = {name: path for owner, files in owned.items() if owner not in large for name, path in files.items()}
    alone = [Content(owner, "wheels", files) for owner, files in large.items()]
    return [Content("inputs", "tree", tree), Content("packages", "wheels", small), *alone]


def compress(content: Content, folder: Path, say: Callable[[str], None]) -> Path:
    """Return the compressed tar of a content, made unless `folder` holds it from an earlier bundle."""
    key = digest({name: file_sha256(path) for name, path in content.files.items()}, 16)
    path = folder / f"{content.name}-{key}.tar.xz"
    if path.exists():
        return path
    say(f"compressing {content.name}: {sum(file.stat().st_size for file in content.files.values()) / 1e6:.0f} MB")
    folder.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".new")
    # The filter turns a program's relative jumps into absolute ones, which repeat; the window spans two builds of a
    # library that lie beside each other.
    filters = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 26}]
    with (
        lzma.open(temporary, "wb", check=lzma.CHECK_CRC64, filters=filters) as stream,
        tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as tar,
    ):
        for name, file in sorted(content.files.items()):
            info = tarfile.TarInfo(name)
            info.size, info.mode = file.stat().st_size, 0o644
            with file.open("rb") as data:
                tar.addfile(info, data)
    temporary.replace(path)
    return path


def cut(archives: Iterable[Path], part_bytes: int, folder: Path) -> tuple[Part, ...]:
    """Write the archives, one after another, as parts of at most `part_bytes`; parts of earlier bundles go."""
    for old in folder.glob("part-*"):
        old.unlink()
    parts = []
    for number, data in enumerate(_blocks(archives, part_bytes), 1):
        name = f"part-{number}"
        write_atomic(folder / name, data)
        parts.append(Part(file=name, bytes=len(data), sha256=hashlib.sha256(data).hexdigest()))
    return tuple(parts)


def _blocks(files: Iterable[Path], size: int) -> Iterator[bytes]:
    """Yield the bytes of some files in blocks of `size`, the last one shorter."""
    block = bytearray()
    for path in files:
        with path.open("rb") as stream:
            while data := stream.read(size - len(block)):
                block += data
                if len(block) == size:
                    yield bytes(block)
                    block.clear()
    if block:
        yield bytes(block)


# --------------------------------------------------------------------------------------------------- all of it
def make(
    sweep: Sweep, engine: str, node: Node, out: Path, part_bytes: int, say: Callable[[str], None] = print
) -> Bundle:
    """Make the bundle of a sweep's points in `out`; raises InputError as its steps do."""
    points = points_of(sweep, engine)
    work = out / "work"
    environments, chosen = [], {}
    downloaded: dict[str, dict[str, Path]] = {}
    for name, lock in locks_of(points, sweep).items():
        carried, left = split_lock(lock, node)
        say(f"{name}: {len(carried)} packages are carried, {len(left)} are the node's")
        downloaded[name] = download(carried, node, work / "downloads", wheel_folders(lock))
        trimmed = {owner: patterns for owner, patterns in node.trim.items() if owner in carried}
        for owner, wheel in downloaded[name].items():
            chosen[wheel.name] = (wheel, trimmed.get(owner, ()))
        environments.append(
            BundledEnvironment(
                name=name,
                key=next(key for key, path in sweep.locks.items() if path == lock),
                packages={**carried, **left},
                wheels=tuple(sorted(wheel.name for wheel in downloaded[name].values())),
                of_the_node=left,
                trimmed=trimmed,
            )
        )
    stored = {}
    for name, (wheel, patterns) in sorted(chosen.items()):
        folder = work / "stored" / digest({"wheel": file_sha256(wheel), "without": patterns}, 16)
        stored[name] = folder / name
        if not stored[name].exists():
            folder.mkdir(parents=True, exist_ok=True)
            repack(wheel, patterns, folder / f".{name}")
            (folder / f".{name}").replace(stored[name])
    inputs = work / "inputs"
    shutil.rmtree(inputs / "results" / "points", ignore_errors=True)
    clients = {client: wheel for wheels in downloaded.values() for client, wheel in wheels.items()}
    write_inputs(points, sweep, clients, inputs)
    contents = contents_of(inputs, stored, engine)
    packed = [compress(content, work / "archives", say) for content in contents]
    archives, offset = [], 0
    for content, path in zip(contents, packed, strict=True):
        size = path.stat().st_size
        archives.append(
            Archive(name=content.name, holds=content.holds, offset=offset, bytes=size, sha256=file_sha256(path))
        )
        offset += size
    bundle = Bundle(
        schema_version=Bundle.SCHEMA_VERSION,
        python=node.python,
        parts=cut(packed, part_bytes, out),
        archives=tuple(archives),
        environments=tuple(environments),
        points=tuple(point.id for point in points),
    )
    bundle.write(out / MANIFEST)
    return bundle


def instructions(bundle: Bundle, clusters: str, configfiles: Sequence[Path]) -> str:
    """Return what to do on the node and after it, as text to read beside the parts."""
    size = sum(part.bytes for part in bundle.parts)
    point = bundle.points[0]
    lines = [
        f"{len(bundle.parts)} parts, {size / 1e6:.0f} MB in all: {', '.join(a.name for a in bundle.archives)}.",
        "",
        f"The node needs a copy of this checkout and Python {bundle.python}. Carry the parts in any order, all at once",
        f"or one after another, each time with {MANIFEST}, into one folder of the checkout, and each time run there:",
        "",
        "    python3 -m workflow.unbundle FOLDER",
        "",
        "It checks and keeps what has arrived, and says what is still to come. Then one command measures a point:",
        "",
        f"    .envs/{OWN_ENVIRONMENT}/bin/python -m workflow.runs results/points/{point}.json results/runs/{point} \\",
        f"      --clusters {clusters}",
        "",
        "Carry results/runs/<point> and results/failures back into the checkout; from there goes on",
        "",
        f"    snakemake --cores 2 --configfile {' '.join(map(str, configfiles))} --config partial=true",
        "",
        "Points, in the order to measure them:",
        *(f"    {point}" for point in bundle.points),
    ]
    return "\n".join(lines) + "\n"


@reports_input_errors
def main(arguments: list[str] | None = None) -> int:
    """Make a bundle; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m workflow.bundle", description=__doc__)
    parser.add_argument(
        "--configfile",
        type=Path,
        nargs="+",
        default=[Path("configs/config.yaml")],
        help="what to run; a further file is laid over the ones before, as Snakemake does",
    )
    parser.add_argument("--engine", required=True, help="the points that this engine serves")
    parser.add_argument("--node", type=Path, required=True, help="what the node has")
    parser.add_argument("--out", type=Path, default=Path(".bundle"), help="where the parts are written")
    parser.add_argument("--part-bytes", type=int, default=PART_BYTES, help="size of a part at most")
    options = parser.parse_args(arguments)
    if options.part_bytes < 1:
        raise InputError(f"found {options.part_bytes}", key="--part-bytes", allowed="a number of bytes above 0")
    node = yamlfile.validate(Node, yamlfile.load(options.node), options.node)
    sweep = plan_sweep(load_config(options.configfile, {}))
    bundle = make(sweep, options.engine, node, options.out, options.part_bytes)
    text = instructions(bundle, sweep.config.clusters, options.configfile)
    write_atomic(options.out / "README.txt", text.encode())
    total = sum(part.bytes for part in bundle.parts)
    print(f"{len(bundle.points)} points in {len(bundle.parts)} parts, {total / 1e6:.0f} MB: {options.out}/README.txt")
    return 0


if __name__ == "__main__":
    sys.exit(main())
