"""Environments of the replay client and of engines: each apart, since their pins fight, and called by path."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from workflow.contract import Document, InputError, digest, reports_input_errors

FIND_LINKS = re.compile(r"--find-links (\S+)")
"""A line of a lock that names a folder of wheels, as pip and uv read it."""


class Environment(Document):
    """What a prepared environment holds. Its file is written last: without it the folder is not an environment."""

    key: str
    """Name and hash of the lock, as the folder is called."""
    python: str
    packages: dict[str, str]
    """Name -> version, as installed."""
    trimmed: dict[str, tuple[str, ...]] = {}
    """Name -> patterns of files that a bundle left out of it, see workflow/bundle.py."""


def environment_key(lock: Path) -> str:
    """Return the folder name of a lock's environment: its name and a hash of its lines, comments left out.

    The key is part of every point that uses the environment: a number measured with other packages is another number.
    """
    lines = [line.split("#", 1)[0].strip() for line in lock.read_text().splitlines()]
    return f"{lock.stem}-{digest([line for line in lines if line], 8)}"


def same_version(found: str | None, declared: str) -> bool:
    """Tell whether a version is the declared one; a build's own label, `0.32.0+cpu`, counts only if it is declared."""
    return found is not None and declared in (found, found.partition("+")[0])


def pins(lock: Path) -> dict[str, str]:
    """Return a lock's distributions, names normalised -> version; environment markers are left out of account.

    Raises InputError for a line that pins nothing: what it installs would change from day to day.
    """
    found: dict[str, str] = {}
    for number, line in enumerate(lock.read_text().splitlines(), 1):
        text = line.split("#", 1)[0].strip()
        if not text or text.startswith("./") or FIND_LINKS.match(text):
            continue  # a folder beside the lock has its version inside
        match = re.match(r"([A-Za-z0-9._-]+)==([^\s;]+)", text)
        if match is None:
            raise InputError(f"found {text!r}", file=lock, line=number, allowed="name==version")
        found[normalised(match[1])] = match[2]
    return found


def wheel_folders(lock: Path) -> list[Path]:
    """Return the folders of wheels of one's own that a lock names, as `--find-links FOLDER` lines beside it."""
    found = (FIND_LINKS.match(line) for line in lock.read_text().splitlines())
    return [lock.parent / match[1] for match in found if match]


def normalised(name: str) -> str:
    """Return a distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def environment_with(wanted: Iterable[str], locks: Mapping[Path, Mapping[str, str]], origin: str) -> str:
    """Return the first environment that pins all that is wanted, each `name==version` or a bare name.

    `locks` holds what each lock pins, read once for all that ask. Raises InputError that says for each environment
    what it lacks; `origin` is who asks.
    """
    lacking = {}
    for lock, have in locks.items():
        lacking[lock] = [want for want in wanted if not _pinned(want, have)]
        if not lacking[lock]:
            return lock.stem
    listed = "; ".join(f"{lock} lacks {', '.join(some)}" for lock, some in lacking.items())
    raise InputError(
        f"no environment holds what {origin} declares: {listed}",
        do="declare a version that one of them pins, or add a lock and name it under the cluster's environments",
    )


def _pinned(want: str, have: Mapping[str, str]) -> bool:
    name, _, version = want.partition("==")
    found = have.get(normalised(name))
    return found is not None and version in ("", found)


def pinned_version(lock: Path, distribution: str) -> str:
    """Return the version that a lock file pins a distribution to; raises InputError if it does not."""
    found = pins(lock).get(normalised(distribution))
    if found is None:
        raise InputError(f"{distribution} is not pinned here", file=lock, allowed=f"a line {distribution}==<version>")
    return found


def prepare(lock: Path, folder: Path) -> Environment:
    """Make the environment of a lock file in `folder`, from nothing, and describe it in `folder`/environment.json.

    A lock is complete: what it does not pin is not installed, also where a package would ask for it. The lock's line
    `# python: SPEC` says which interpreters it was resolved for. Raises InputError with the end of the installer's
    message if it fails.
    """
    # Programs of an environment name its Python by path: by a path through a link they would end with the link.
    folder = folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    uv = str(Path(sys.executable).parent / "uv")
    _run([uv, "venv", "--quiet", "--python", _python_wanted(lock), str(folder)], lock)
    python = str(folder / "bin" / "python")
    # Exactly the lock's lines: what it leaves out on purpose, a wheel that breaks the engine, must not come back as a
    # dependency. Compiled here, once: nodes that start together would each compile the same modules, at every start.
    # A line may name a folder beside the lock.
    install = [uv, "pip", "sync", "--quiet", "--compile-bytecode", "--python", python, lock.name]
    _run(install, lock, lock.parent)
    listed = _run([uv, "pip", "list", "--quiet", "--python", python, "--format", "json"], lock)
    environment = Environment(
        schema_version=Environment.SCHEMA_VERSION,
        key=environment_key(lock),
        python=_run([python, "-c", "import platform; print(platform.python_version())"], lock).strip(),
        packages={package["name"]: package["version"] for package in json.loads(listed)},
    )
    environment.write(folder / "environment.json")
    return environment


def _python_wanted(lock: Path) -> str:
    match = re.search(r"^# python: (.+)$", lock.read_text(), re.MULTILINE)
    if match is None:
        raise InputError(
            "the lock file does not say for which Python it is", file=lock, allowed="# python: >=3.11,<3.14"
        )
    return match[1].strip()


def _run(argv: list[str], lock: Path, cwd: Path | None = None) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=cwd)
    if done.returncode:
        tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-8:])
        raise InputError(f"`{' '.join(argv)}` failed:\n{tail}", file=lock, do="mend the cause and run again")
    return done.stdout


@reports_input_errors
def main() -> int:
    """Prepare one environment: `python -m workflow.environments LOCK FOLDER`; the folder is named by its key."""
    lock, folder = (Path(argument) for argument in sys.argv[1:3])
    environment = prepare(lock, folder)
    print(f"{environment.key}: {len(environment.packages)} packages on Python {environment.python} in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
