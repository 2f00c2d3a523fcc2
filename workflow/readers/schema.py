"""Schema versions of the replay client's files: the names and units of one that nobody has looked at are a guess."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workflow.contract import InputError


def known_object(data: Any, path: Path, what: str, versions: Sequence[str]) -> dict[str, Any]:
    """Return parsed JSON that is an object of a known `schema_version`; raises InputError for anything else."""
    if not isinstance(data, dict):
        raise InputError(f"{what} is not a JSON object", file=path, allowed="an object")
    version = data.get("schema_version")
    if version not in versions:
        raise InputError(
            f"found version {version!r} of {what}",
            file=path,
            key="schema_version",
            allowed=", ".join(versions),
            do="replay with the client version that the configuration names, or add this version to its reader",
        )
    return data
