"""A real Slurm for these tests and checkouts to run sweeps in. Skipped where Slurm is not installed."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkouts import HERE, Checkout


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Start the cluster and return the environment of its clients."""
    if shutil.which("slurmctld", path=f"{os.environ['PATH']}:/usr/sbin") is None:
        pytest.skip("Slurm is not installed: make test-slurm installs it")
    folder = tmp_path_factory.mktemp("slurm")
    script = str(HERE / "cluster.sh")
    started = subprocess.run(["bash", script, "start", str(folder)], stdout=subprocess.PIPE, text=True, check=True)
    assert started.stdout.startswith("export SLURM_CONF=")
    client = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    os.environ.update(client)
    yield client
    subprocess.run(["bash", script, "stop", str(folder)], check=True)


@pytest.fixture
def checkout(slurm: dict[str, str], tmp_path: Path) -> Iterator[Checkout]:  # noqa: ARG001 - it has to be there first
    """Return a clean checkout; whatever a test left running there is ended."""
    made = Checkout(tmp_path)
    yield made
    made.close()
