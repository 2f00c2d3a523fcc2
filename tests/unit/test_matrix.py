import json
import subprocess

import pytest
from spaces import RUNNERS, agentic, entry, fixed, log, master, runners, space, worker

from workflow import yamlfile
from workflow.config import ChangelogSelection, Config
from workflow.contract import InputError
from workflow.lint import lint
from workflow.matrix import expand, main, plan_matrix, plan_rows
from workflow.rows import Row

NONE = "kv-offloading: none"
LMCACHE = "kv-offloading: dram, kv-offload-backend: {name: lmcache, version: 0.5.1}"
KEY = space("a", agentic(f"tp: 8, {NONE}, conc-list: [1, 2]"))


# -------------------------------------------------------------------------------------------------------------- rows
def test_the_lmcache_ladder_of_b200_gives_its_14_points_with_router_and_budget():
    router = "router: {name: vllm-router, version: 0.1.14}"
    dep = f"tp: 8, ep: 8, dp-attn: true, {LMCACHE}, {router}"
    key = "dsv4-fp4-b200-vllm-agentic-lmcache"
    text = agentic(
        f"tp: 8, {LMCACHE}, conc-list: [8, 12, 16]",
        f"{dep}, conc-list: [8, 16, 24, 32, 40, 48, 56, 64, 68, 72, 80]",
        utilization=0.80,
    )
    rows = [item.row for item in plan_rows(log(entry(key)), master(space(key, text)), runners())]
    assert len(rows) == 14
    assert {row.kv_offload_backend.name for row in rows} == {"lmcache"}
    assert {row.total_cpu_dram_gb for row in rows} == {2399}
    assert [row.conc for row in rows] == [8, 12, 16, 8, 16, 24, 32, 40, 48, 56, 64, 68, 72, 80]
    assert [row.router is not None for row in rows] == [row.dp_attn for row in rows] == [False] * 3 + [True] * 11


def test_the_example_of_the_docs_plans_what_it_says(project):
    text = (project / "docs" / "write-an-entry.md").read_text()
    example, searched = [part.split("```")[0] for part in text.split("```yaml\n")[1:]]
    entries, found, facts = log(example), master(searched), runners()
    rows = plan_rows(entries, found, facts)
    assert [item.row.conc for item in rows] == [8, 12, 16]
    assert lint(entries, found, facts, rows) == []


def test_a_row_knows_where_it_came_from():
    (first, _) = plan_rows(log(entry("a")), master(KEY), runners())
    assert first.origin == "master.yaml:12 (a, conc 1)"
    assert first.entry.title.startswith("perf-changelog.yaml:1 (entry 0, ")


def test_a_row_survives_its_json_in_either_spelling():
    (first, _) = [item.row for item in plan_rows(log(entry("a")), master(KEY), runners())]
    for by_alias in (True, False):
        assert Row.model_validate_json(first.model_dump_json(by_alias=by_alias)) == first


def test_a_key_that_two_entries_name_is_planned_once_by_the_first():
    rows = plan_rows(log(entry("a", pull=1), entry("a", pull=2)), master(KEY), runners())
    assert [(item.row.conc, item.entry.index) for item in rows] == [(1, 0), (2, 0)]


def test_what_cannot_run_here_is_listed_with_the_reason_and_never_dropped():
    pair = f"prefill: {worker(4)}, decode: {worker(4)}, conc-list: [4, 8]"
    spaces = [
        space("a", fixed("tp: 8, conc-list: [4]") + agentic(f"tp: 8, {NONE}, conc-list: [1]")),
        space("b", agentic(pair) + fixed(pair), runner="cluster:gb200-nv", multinode=True),
    ]
    found = expand(log(entry("a", "b")), master(*spaces), runners())
    assert [item.row.conc for item in found.rows] == [1]
    assert [(item.config_key, item.why.split(":")[0], item.row.conc) for item in found.not_runnable] == [
        ("a", "fixed-seq-len", 4),
        ("b", "several nodes", (4, 8)),
        ("b", "several nodes", (4,)),
        ("b", "several nodes", (8,)),
    ]
    only = expand(log(entry("a", more="  evals-only: true\n")), master(*spaces), runners())
    assert (only.rows, len(only.not_runnable)) == ((), 2)


@pytest.mark.parametrize(
    ("entries", "spaces", "words"),
    [
        (entry("a", more="  scenario-type: [fixed-seq-len]\n"), KEY, "selects no single-node agentic-coding row"),
        (entry("a"), space("a", fixed("tp: 8, conc-list: [4, 8]")), "2 rows are not runnable here yet (fixed-seq-len"),
        (entry("a", more="  evals-only: true\n"), KEY, "accuracy runs only"),
        (entry("b*"), KEY, "'b*' matches no config key"),
    ],
)
def test_X10_an_empty_plan_is_an_error_that_says_why(entries, spaces, words):
    with pytest.raises(InputError) as caught:
        plan_rows(log(entries), master(spaces), runners())
    assert words in str(caught.value)


def test_X10_a_wildcard_for_everything_plans_everything():
    assert len(plan_rows(log(entry("*")), master(KEY, KEY.replace("a:", "b:", 1)), runners())) == 4


def test_more_gpus_than_a_node_has_are_refused():
    for line in (f"tp: 16, {NONE}", f"tp: 4, pp: 4, {LMCACHE}"):
        with pytest.raises(InputError, match=r"master\.yaml:12: a: 16 GPUs on a node of 8"):
            plan_rows(log(entry("a")), master(space("a", agentic(f"{line}, conc-list: [1]"))), runners())


def test_5000_points_check_each_search_space_once(monkeypatch):
    """Checking a search space again for every row or finding would make a plan quadratic."""
    text = [space(f"k{i}", agentic(f"tp: 8, {LMCACHE}, conc-list: {list(range(1, 51))}")) for i in range(100)]
    found, facts, entries = master(*text), runners(), log(entry("k*"))
    checked = []
    validate = yamlfile.validate
    monkeypatch.setattr(yamlfile, "validate", lambda *given: checked.append(given[3]) or validate(*given))
    rows = plan_rows(entries, found, facts)
    lint(entries, found, facts, rows)
    assert len(rows) == 5000
    assert sorted(checked) == sorted((f"k{i}",) for i in range(100))


# -------------------------------------------------------------------------------------------------------- the checkout
def git(folder, *arguments):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "master.yaml").write_text(KEY)
    (tmp_path / "runners.yaml").write_text(RUNNERS)
    (tmp_path / "log.yaml").write_text(entry("a", pull=1))
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        git(tmp_path, *arguments)
    return tmp_path


def config(**rest):
    return Config(masters=("master.yaml",), runners="runners.yaml", **rest)


def test_a_checkout_is_planned_from_its_config(checkout):
    plan = plan_matrix(config(changelog=ChangelogSelection(file="log.yaml")), checkout)
    assert [item.row.conc for item in plan.rows] == [1, 2]
    assert (plan.findings, plan.messages) == ((), ())


def test_an_append_only_entry_is_held_against_the_configs_of_the_base(checkout):
    (checkout / "master.yaml").write_text(KEY.replace("[1, 2]", "[1, 2, 3]"))
    (checkout / "log.yaml").write_text(entry("a", pull=1) + entry("a", pull=2, more="  append-only: true\n"))
    plan = plan_matrix(config(changelog=ChangelogSelection(file="log.yaml", base="HEAD")), checkout)
    assert [item.row.conc for item in plan.rows] == [3]


def test_findings_are_warnings_and_with_strict_errors(checkout):
    (checkout / "log.yaml").write_text(entry("a", pull="XXX", says="conc 1/2/3"))
    selection = ChangelogSelection(file="log.yaml")
    plan = plan_matrix(config(changelog=selection), checkout)
    assert [item.code.value for item in plan.findings] == ["placeholder_link", "described_concurrency_differs"]
    with pytest.raises(InputError) as caught:
        plan_matrix(config(changelog=selection, strict=True), checkout)
    assert str(caught.value).splitlines() == [item.message for item in plan.findings]


def test_a_change_that_only_withdraws_is_no_success_with_nothing(checkout):
    both = entry("a", pull=1) + entry("a", pull=2, says="Another.")
    (checkout / "log.yaml").write_text(both)
    git(checkout, "commit", "-q", "-a", "-m", "second")
    (checkout / "log.yaml").write_text(entry("a", pull=1))
    with pytest.raises(InputError, match="nothing to measure: ") as caught:
        plan_matrix(config(changelog=ChangelogSelection(file="log.yaml", base="HEAD", entries="newest")), checkout)
    assert "withdrawn; its results are kept and it plans nothing" in str(caught.value)


# ------------------------------------------------------------------------------------------------------- command line
@pytest.fixture
def change(tmp_path):
    for side, text in (("base", entry("a", pull=1)), ("head", entry("a", pull=1) + entry("a", pull=2, says="conc 4"))):
        configs = tmp_path / side / "configs"
        configs.mkdir(parents=True)
        (tmp_path / side / "perf-changelog.yaml").write_text(text)
        (configs / "amd-master.yaml").write_text(KEY)
        (configs / "nvidia-master.yaml").write_text(KEY.replace("a:", "b:", 1))
        (configs / "runners.yaml").write_text(RUNNERS)
    return tmp_path


def run(folder, *more):
    return main(["--base", str(folder / "base"), "--head", str(folder / "head"), *more])


def test_the_command_prints_rows_with_their_origin_and_findings(change, capsys):
    assert run(change) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [row["row"]["conc"] for row in printed["rows"]] == [1, 2]
    assert printed["rows"][0]["origin"].endswith("configs/amd-master.yaml:12 (a, conc 1)")
    assert [finding["code"] for finding in printed["findings"]] == ["described_concurrency_differs"]
    assert [item["kind"] for item in printed["changes"]] == ["added"]


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("head/configs/runners.yaml", None, "runners.yaml: no such file"),
        ("head/configs/amd-master.yaml", "a: [1", "amd-master.yaml:1: not YAML"),
        ("head/configs/nvidia-master.yaml", "x:\n\ty: 1\n", "indent with spaces"),
        ("head/configs/nvidia-master.yaml", KEY, "config key 'a' is also in"),
        ("head/perf-changelog.yaml", None, "perf-changelog.yaml: no such file"),
        ("head/perf-changelog.yaml", "a: 1\n", "no list of entries"),
        ("head/perf-changelog.yaml", entry("a", pull=1), "no entry was added"),
        ("head/perf-changelog.yaml", entry("a", pull=1) + entry("c", pull=2), "'c' matches no config key"),
        ("base/perf-changelog.yaml", None, "perf-changelog.yaml: no such file"),
    ],
)
@pytest.mark.parametrize("flags", [[], ["--inferencex"]])
def test_a_mistake_is_one_message_and_status_2(change, capsys, file, text, words, flags):
    path = change / file
    path.unlink() if text is None else path.write_text(text)
    assert run(change, *flags) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert "Traceback" not in captured.err


def test_a_missing_folder_is_said(tmp_path, capsys):
    assert run(tmp_path) == 2
    assert "base: no such folder" in capsys.readouterr().err


def test_an_edit_beside_an_addition_is_told_and_the_addition_planned(change, capsys):
    (change / "head" / "perf-changelog.yaml").write_text(entry("a", pull=1, says="Other.") + entry("b", pull=2))
    assert run(change, "--inferencex") == 0
    captured = capsys.readouterr()
    assert "edited: description was ['Measure it.'] and is ['Other.']" in captured.err
    assert len(json.loads(captured.out)["single_node"]["agentic"]) == 2
