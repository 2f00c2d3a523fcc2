"""What the Python engines have in common: the version lines before the command, the version of a release image."""

import re

from workflow.serving import Argv, VersionProbe

RELEASE_TAG = re.compile(r"v?(?P<version>\d+\.\d+\.\d+(?:rc\d+)?(?:\.post\d+)?)(?:-cu\d+)?")


def versioned(distributions: tuple[str, ...], argv: Argv) -> Argv:
    """Return argv that prints the installed versions of some distributions and then becomes `argv`."""
    return ("python3", "<path:project>/workflow/versioned.py", *distributions, "--", *argv)


def version_probe(component: str, service: str, declared: str | None) -> VersionProbe:
    """Return the probe that reads back a line which `versioned` printed."""
    pattern = rf"^version of {re.escape(component)} is (?P<version>\S+)"
    return VersionProbe(component=component, service=service, pattern=pattern, declared=declared)


def released_version(image: str) -> str | None:
    """Return the version that a release image's tag promises; None for nightlies, which are pinned by their tag only.

    A nightly's tag names a commit or a date, its wheel another number: comparing them would fail every such run.
    """
    found = RELEASE_TAG.fullmatch(image.rpartition(":")[2])
    return found["version"] if found else None
