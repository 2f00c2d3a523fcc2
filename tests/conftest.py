"""Fixtures that several tests use."""

import signal
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
