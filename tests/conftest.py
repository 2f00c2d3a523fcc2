"""Fixtures that several tests use."""

import os
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what tests can be asked to do."""
    parser.addoption("--regenerate-images", action="store_true", help="write tests/images/ anew instead of comparing")


def hear_interrupts() -> None:
    """Let a started program hear Ctrl-C: below `nohup` or in a background job SIGINT is ignored, and inherited so."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture(scope="session")
def project() -> Path:
    """Return the checkout."""
    return PROJECT


@pytest.fixture(scope="session")
def shared() -> Path:
    """Return the reference data beside the checkout; a test that needs it is skipped without."""
    folder = PROJECT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("the shared reference data is not beside this checkout")
    return folder


def put_on_path(folder: Path, programs: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Write Bash programs, name -> text, to a new folder that is searched before all others."""
    folder.mkdir()
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
