"""Files as they were at a git revision. Only reads; a plan never changes a checkout."""

from pathlib import Path

from workflow.contract import InputError


def file_at(root: Path, revision: str, path: str) -> bytes:
    """Return the bytes of `path`, relative to the folder `root` of a git checkout, as they were at `revision`.

    Raises InputError: no git, no checkout, an unknown revision, or a revision without that file. git's exit status is
    checked, since an empty answer would read as "everything is new".
    """
    commit = _git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    if commit is None:
        if _git(root, "rev-parse", "--git-dir") is None:
            raise InputError(
                "this folder is no git checkout", file=root, key="changelog.base", do="drop changelog.base"
            )
        raise InputError(
            f"git knows no revision {revision!r}",
            file=root,
            key="changelog.base",
            allowed="a commit, a branch, a tag",
            do="fetch it first if it is a remote one; a shallow clone may lack it",
        )
    text = _git(root, "cat-file", "blob", f"{commit.decode().strip()}:./{path}")
    if text is None:
        raise InputError(f"revision {revision!r} has no file {path}", file=root / path, key="changelog.base")
    return text


def _git(root: Path, *arguments: str) -> bytes | None:
    """Return git's output, or None where it says no."""
    import subprocess  # noqa: PLC0415 - most plans ask no revision, and the import is a part of their time

    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, check=False)  # noqa: S607
    except FileNotFoundError:
        raise InputError("git is not installed", key="changelog.base", do="install it or drop changelog.base") from None
    return done.stdout if done.returncode == 0 else None
