"""Install a bundle on a node without a network, with the node's own Python and nothing beside its standard library.

`python3 -m workflow.unbundle FOLDER` takes the parts that have arrived in FOLDER, checks them, and installs what is
complete; run it again when more have come. `python3 -m workflow.unbundle --describe` says what this node has, which is
what `python -m workflow.bundle` makes a bundle for. Nothing is changed outside of the checkout.
"""

import argparse
import hashlib
import importlib.metadata
import io
import json
import lzma
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1
MANIFEST = "bundle.json"
OWN_ENVIRONMENT = "workflow"
"""Name of the environment that runs `python -m workflow.runs`; a link below `.envs` leads to it."""
BOUND_TO_ITS_PLACE = "torch"
"""Its libraries look for those of other packages beside themselves, so they are used where the node has them."""


class Refused(Exception):
    """What keeps the bundle from being installed, as one message."""


class Joined(io.RawIOBase):
    """Bytes `offset` to `offset + size` of some files read as one."""

    def __init__(self, files: Sequence[Path], offset: int, size: int) -> None:
        self._files, self._left = list(files), size
        while self._files and (length := self._files[0].stat().st_size) <= offset:
            offset -= length
            self._files.pop(0)
        self._stream = self._files.pop(0).open("rb")
        self._stream.seek(offset)

    def readable(self) -> bool:
        """Yes."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer, from the next file where one ends."""
        view = memoryview(buffer)[: self._left]
        while view:
            count = self._stream.readinto(view)
            if count:
                self._left -= count
                return count
            self._stream.close()
            if not self._files:
                raise EOFError("the parts end before the archive does")
            self._stream = self._files.pop(0).open("rb")
        return 0

    def close(self) -> None:
        """Close the file that is being read."""
        self._stream.close()
        super().close()


def sha256(path: Path) -> str:
    """Return the sha256 of a file as hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read a bundle's manifest; raises Refused for a missing, damaged or unknown one."""
    path = folder / MANIFEST
    try:
        data: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise Refused(f"{path}: no such file; carry {MANIFEST} with every part") from None
    except ValueError as error:
        raise Refused(f"{path}: not JSON: {error}; carry it again") from None
    if data.get("schema_version") != SCHEMA_VERSION:
        found = data.get("schema_version")
        raise Refused(
            f"{path}: schema_version: found {found!r}; allowed: {SCHEMA_VERSION}; make the bundle with this checkout"
        )
    return data


def version_here(name: str) -> str | None:
    """Return the version of a distribution that this Python has, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_node(manifest: dict[str, Any], version_of: Callable[[str], str | None] = version_here) -> None:
    """Raise Refused where this node is not the one the bundle was made for: what it left to the node must be here."""
    found = platform.python_version()
    if found.split(".")[:2] != manifest["python"].split(".")[:2]:
        raise Refused(f"python3 here is {found}, the bundle is for {manifest['python']}; start it with that one")
    wrong = {}
    for environment in manifest["environments"]:
        for name, wanted in environment["of_the_node"].items():
            if (here := version_of(name)) != wanted:
                wrong[name] = f"{name} {here or 'is not installed'} here, {wanted} in the bundle"
    if wrong:
        raise Refused(
            "this node is not the one that the bundle was made for:\n  "
            + "\n  ".join(wrong[name] for name in sorted(wrong))
            + "\ndescribe it with `python3 -m workflow.unbundle --describe` and make the bundle for it"
        )


def take_parts(manifest: dict[str, Any], folder: Path, store: Path) -> list[Path | None]:
    """Move what has arrived into the store, checked; return each part's file there, None for one still to come.

    Raises Refused for a damaged part, before anything of it is used.
    """
    store.mkdir(parents=True, exist_ok=True)
    taken: list[Path | None] = []
    damaged = []
    for part in manifest["parts"]:
        kept, arrived = store / f"{part['sha256']}.part", folder / part["file"]
        if not kept.exists() and arrived.exists():
            if (found := sha256(arrived)) != part["sha256"]:
                damaged.append(f"{arrived}: damaged: {arrived.stat().st_size} bytes with sha256 {found}, made were ")
                damaged[-1] += f"{part['bytes']} with {part['sha256']}; carry it again"
            else:
                temporary = kept.with_suffix(".new")
                shutil.copyfile(arrived, temporary)
                temporary.replace(kept)
        taken.append(kept if kept.exists() else None)
    if damaged:
        raise Refused("\n".join(damaged))
    return taken


def needed_parts(manifest: dict[str, Any], archive: dict[str, Any]) -> range:
    """Return the indices of the parts that hold an archive; all parts but the last are of one size."""
    size = manifest["parts"][0]["bytes"]
    return range(archive["offset"] // size, (archive["offset"] + archive["bytes"] - 1) // size + 1)


def unpack(manifest: dict[str, Any], archive: dict[str, Any], parts: Sequence[Path | None], store: Path) -> Path | None:
    """Unpack an archive whose parts are all here, once; return its folder, None while it is not complete."""
    folder: Path = store / archive["sha256"]
    if folder.exists():
        return folder
    needed = needed_parts(manifest, archive)
    files = [part for i in needed if (part := parts[i]) is not None]
    if len(files) < len(needed):
        return None
    # A folder of its own until it is whole: a killed attempt leaves nothing that counts as unpacked.
    temporary = Path(tempfile.mkdtemp(dir=store, prefix="unpacking-"))
    offset = archive["offset"] - needed.start * manifest["parts"][0]["bytes"]
    with (
        Joined(files, offset, archive["bytes"]) as joined,
        lzma.open(io.BufferedReader(joined, 1 << 20)) as plain,
        tarfile.open(fileobj=plain, mode="r|") as tar,
    ):
        # Where Python has filters: Debian 12's 3.11.2 has none. What is in the archive was checked by its sha256.
        tar.extraction_filter = getattr(tarfile, "data_filter", None)
        tar.extractall(temporary)  # noqa: S202
    temporary.replace(folder)
    return folder


def install(environment: dict[str, Any], wheels: dict[str, Path], environments: Path) -> str | None:
    """Make an environment from its wheels, once; return what was done, None while wheels are missing.

    The environment has the bundle's packages and, of this Python's own, those that the lock leaves to it, where they
    say which files they have. Raises Refused if pip fails, or if a version in it is not the lock's.
    """
    folder: Path = environments / environment["key"]
    described = folder / "environment.json"
    if described.exists():
        return f"{environment['key']}: is there"
    files = [wheels[name] for name in environment["wheels"] if name in wheels]
    if len(files) < len(environment["wheels"]):
        return None
    shutil.rmtree(folder, ignore_errors=True)
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install", "--quiet"]
    pip += ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--root-user-action", "ignore"]
    _run([*pip, *map(str, files)], environment["key"])
    library = next((folder / "lib").glob("python3*/site-packages"))
    # After the installation: pip would otherwise take the node's packages for the environment's.
    shared = [importlib.metadata.distribution(name) for name in environment["of_the_node"]]
    if BOUND_TO_ITS_PLACE in environment["of_the_node"] or not all(package.files for package in shared):
        (library / "node.pth").write_text("".join(f"{path}\n" for path in own_packages()))
    else:
        # Not all of them: a client that sees a torch which it does not need spends ten seconds on importing it.
        link_files((file for package in shared for file in package.files or ()), library)
    # Compiled by all cores now, instead of by one at the first start of each program; a file that does not compile is
    # a template of its package, and says so when it is used.
    compiled = [str(python), "-m", "compileall", "-q", "-j", "0", str(library)]
    subprocess.run(compiled, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    seen = json.loads(_run([str(python), "-c", _VERSIONS, *environment["packages"]], environment["key"]))
    wrong = [f"{name} {seen[name]}" for name, wanted in environment["packages"].items() if seen[name] != wanted]
    if wrong:
        raise Refused(f"{folder}: installed is {', '.join(wrong)}, which is not what the lock pins")
    document = {
        "schema_version": 1,
        "key": environment["key"],
        "python": platform.python_version(),
        "packages": seen,
        "trimmed": environment["trimmed"],
    }
    temporary = described.with_suffix(".new")
    temporary.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    temporary.replace(described)
    return f"{environment['key']}: {len(files)} packages installed, {len(environment['of_the_node'])} are the node's"


def link_files(files: Iterable[importlib.metadata.PackagePath], library: Path) -> None:
    """Link files of this Python's packages into an environment, those that are beside its packages left out.

    File by file: several distributions may share a folder, and the environment's own may be one of them.
    """
    for file in files:
        link = library / file
        if ".." in file.parts or link.exists():
            continue
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(Path(file.locate()))


_VERSIONS = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
def of(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
print(json.dumps({name: of(name) for name in sys.argv[1:]}))
"""


def own_packages() -> list[str]:
    """Return the folders of this Python's installed packages, in the order they are searched."""
    return [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages") and Path(path).is_dir()]


def _run(argv: list[str], what: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-8:])
        raise Refused(f"{what}: `{' '.join(argv[:6])} ...` failed:\n{tail}")
    return done.stdout


def unbundle(folder: Path, root: Path) -> tuple[list[str], list[str]]:
    """Install what has arrived below `root`; return what was done, and the parts that are still to come.

    Raises Refused, with everything that was installed before left as it is.
    """
    manifest = read_manifest(folder)
    check_node(manifest)
    environments = root / ".envs"
    store = environments / ".bundle"
    parts = take_parts(manifest, folder, store)
    for left in store.glob("unpacking-*"):
        shutil.rmtree(left)
    with ThreadPoolExecutor() as pool:
        unpacked = list(pool.map(lambda archive: unpack(manifest, archive, parts, store), manifest["archives"]))
        wheels: dict[str, Path] = {}
        for archive, place in zip(manifest["archives"], unpacked, strict=True):
            if place is not None and archive["holds"] == "wheels":
                wheels |= {path.name: path for path in place.iterdir()}
            elif place is not None:
                shutil.copytree(place, root, dirs_exist_ok=True)
        done = list(pool.map(lambda one: install(one, wheels, environments), manifest["environments"]))
    for environment, said in zip(manifest["environments"], done, strict=True):
        if said and environment["name"] == OWN_ENVIRONMENT:
            _link(environments / OWN_ENVIRONMENT, environment["key"])
    missing = [part["file"] for part, kept in zip(manifest["parts"], parts, strict=True) if kept is None]
    return [said for said in done if said], missing


def _link(link: Path, target: str) -> None:
    temporary = link.with_name(f".{link.name}.new")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(link)


def describe() -> str:
    """Return this node as the YAML that a bundle is made from: Python, C library, installed distributions."""
    library, version = platform.libc_ver()
    found = sorted({(_normalised(one.name), one.version) for one in importlib.metadata.distributions() if one.name})
    # First on the path wins, as it does in an import.
    packages = {name: version_here(name) for name, _ in found}
    lines = [f"python: {platform.python_version()}", f"{library or 'libc'}: '{version}'", "packages:"]
    lines += [f"  {name}: '{value}'" for name, value in packages.items()]
    return "\n".join(lines) + "\n"


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main(arguments: Iterable[str] | None = None) -> int:
    """Install what has arrived; return 0, also while parts are missing unless --complete, and 2 if it is refused."""
    parser = argparse.ArgumentParser(prog="python3 -m workflow.unbundle", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help=f"where the parts and {MANIFEST} have arrived")
    parser.add_argument("--into", type=Path, default=Path(), help="the checkout, the current folder by default")
    parser.add_argument("--complete", action="store_true", help="end with 2 while a part is missing")
    parser.add_argument("--describe", action="store_true", help="print what this node has, as YAML")
    options = parser.parse_args(None if arguments is None else list(arguments))
    if options.describe:
        print(describe(), end="")
        return 0
    if options.folder is None:
        parser.error("give the folder of the parts, or --describe")
    try:
        done, missing = unbundle(options.folder, options.into.resolve())
    except Refused as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join([*done, f"still to come: {', '.join(missing)}" if missing else "all parts are here"]))
    return 2 if missing and options.complete else 0


if __name__ == "__main__":
    sys.exit(main())
