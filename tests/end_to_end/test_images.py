"""Points that are served in a container: the image is there before anything is measured, or nothing is.

Scripts on the PATH stand for apptainer and a registry, which not every machine has; the engine in the "image" is real.
"""

import json

import pytest

from tests.conftest import put_on_path
from tests.end_to_end.conftest import copy_checkout

DIGEST = f"sha256:{'0a' * 32}"
TOOLS = {
    "skopeo": f"echo {DIGEST}",
    "apptainer": """case "$1" in
      pull) [ -e "$0.works" ] || { echo 'FATAL: while pulling: manifest unknown' >&2; exit 1; }; echo image > "$2";;
      exec) echo "$*" >> "$0.served"; while [ "$1" != env ]; do shift; done; exec "$@";;
    esac""",
}


@pytest.fixture
def tools(tmp_path, monkeypatch):
    folder = tmp_path / "tools"
    put_on_path(folder, TOOLS, monkeypatch)
    return folder


def test_an_image_is_imported_first_and_served_by_its_digest(project, tools, tmp_path):
    checkout = copy_checkout(project, tmp_path / "checkout")
    (checkout.root / "configs/clusters.yaml").write_text("clusters:\n  cluster:local:\n    launcher: apptainer\n")
    checkout.snakemake("--dry-run")
    point = min(path.stem for path in checkout.results.glob("points/*.json"))
    target = f"results/runs/{point}/run.json"
    assert checkout.planned(target)["image"] == 1

    failed = checkout.snakemake(target, "--keep-going", check=False)
    assert failed.returncode
    assert "image_pull: `apptainer pull " in failed.stderr
    assert "manifest unknown" in failed.stderr
    assert not (checkout.results / "runs").exists()
    problems = [line for line in failed.stderr.splitlines() if "  failed  " in line]
    assert len(problems) == len(list(checkout.results.glob("points/*.json")))
    assert all("image_pull" in line for line in problems)

    (tools / "apptainer.works").touch()
    checkout.snakemake(target)
    run = json.loads((checkout.root / target).read_text())
    assert run["image_digest"] == DIGEST
    (image,) = checkout.results.glob("images/*.sif")
    assert DIGEST.replace(":", "-") in image.name
    assert f" {image} env " in (tools / "apptainer.served").read_text()
    assert "image" not in checkout.planned()
