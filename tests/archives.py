"""Real data comes in archives."""

import tarfile
from collections.abc import Callable
from pathlib import Path

# Debian 12's Python 3.11.2 has no filters; later ones warn without.
FILTER = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}


def unpack(archive: Path, folder: Path, wanted: Callable[[str], bool] = lambda _name: True) -> None:
    """Unpack the members of a tar archive whose names are wanted."""
    with tarfile.open(archive) as tar:
        tar.extractall(folder, members=[one for one in tar.getmembers() if wanted(one.name)], **FILTER)
