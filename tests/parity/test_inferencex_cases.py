"""The matrix of 25 real changes of InferenceX, row by row, as its own generator emits it."""

import json
import tarfile
from pathlib import Path

import pytest

from tests.archives import unpack
from workflow.matrix import main
from workflow.rows import SCENARIOS, rows_of
from workflow.searchspace import load_master, load_runners

ARCHIVE = Path(__file__).parents[2] / ".." / "shared" / "inferencex" / "matrix-cases.tar.xz"


def revisions():
    if not ARCHIVE.is_file():
        return [pytest.param("none", marks=pytest.mark.skip(reason="no matrix-cases.tar.xz in ../shared/inferencex"))]
    with tarfile.open(ARCHIVE) as archive:
        names = {name for name in archive.getnames() if name.endswith("/expected.json")}
    return sorted(Path(name).parent.name for name in names)


@pytest.fixture(scope="session")
def cases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cases")
    unpack(ARCHIVE, folder)
    return {path.parent.name: path.parent for path in folder.rglob("expected.json")}


@pytest.mark.parametrize("revision", revisions())
def test_a_real_change_gives_the_rows_of_inferencex(cases, revision, capsys):
    case = cases[revision]
    status = main(["--base", str(case / "base"), "--head", str(case / "head"), "--inferencex"])
    printed = json.loads(capsys.readouterr().out)
    expected = json.loads((case / "expected.json").read_text())
    assert status == 0
    assert printed.keys() == expected.keys()
    for part, rows in expected.items():
        # A list compares in order; a dict of lists by name, each list in order.
        assert printed[part] == rows, part


@pytest.mark.parametrize("revision", [param for param in revisions() if param in ("none", "96783731b")] or revisions())
def test_the_lmcache_pull_request_gives_four_points_and_one_eval(cases, revision, capsys):
    case = cases[revision]
    main(["--base", str(case / "base"), "--head", str(case / "head"), "--inferencex"])
    printed = json.loads(capsys.readouterr().out)
    assert [row["conc"] for row in printed["single_node"]["agentic"]] == [4, 8, 10, 12]
    assert [(row["conc"], row["eval-only"]) for row in printed["agentic_evals"]] == [(12, True)]


def test_every_real_search_space_is_accepted_and_counted(shared):
    configs = shared / "inferencex" / "configs"
    master = load_master([configs / "amd-master.yaml", configs / "nvidia-master.yaml"])
    runners = load_runners(configs / "runners.yaml")
    counts: dict[str, int] = {}
    agentic_keys = set()
    for key in master.places:
        for placed in rows_of(key, master, runners, SCENARIOS):
            kind = type(placed.row).__name__
            counts[kind] = counts.get(kind, 0) + 1
            agentic_keys |= {key} if kind in ("Row", "MultiNodeRow") else set()
    # The README beside the data: 75 agentic config keys, 746 points, 482 of them single-node.
    assert (len(agentic_keys), counts["Row"], counts["Row"] + counts["MultiNodeRow"]) == (75, 482, 746)
