import json
from dataclasses import replace

import pytest
from spaces import agentic, entry, fixed, log, master, runners, space

from tests.archives import unpack
from workflow.contract import InputError
from workflow.lint import PlanCode, codes_table, lint, lint_text, refuse
from workflow.matrix import expand

LMCACHE = "kv-offloading: dram, kv-offload-backend: {name: lmcache, version: 0.5.4rc2}"
KEY = space("dsv4-lmcache", agentic(f"tp: 8, {LMCACHE}, conc-list: [4, 8, 10, 12]"))


def findings(entries, *spaces, facts=None, older=()):
    found, facts = master(*spaces), facts or runners()
    selected = entries[len(older) :] if older else entries
    expansion = expand(selected, found, facts)
    return lint(selected, found, facts, [*expansion.rows, *expansion.not_runnable], entries)


def codes(says: str, *spaces: str) -> list[str]:
    return [item.code for item in findings(log(entry("dsv4-lmcache", says=says)), *(spaces or (KEY,)))]


# ---------------------------------------------------------------------------------------------------- the description
def test_a_description_with_other_concurrencies_is_found_with_its_line():
    entries = log(entry("dsv4-lmcache", says="Add LMCache at TP8 conc 4/8/16 on the same stack."))
    (item,) = findings(entries, KEY)
    assert item.message == (
        "perf-changelog.yaml:4: the description says conc 4/8/16, and the search space has [4, 8, 10, 12]; "
        "nothing measures 16: mend the description or the search space [described_concurrency_differs]"
    )


@pytest.mark.parametrize(
    "says",
    [
        "Add points at concurrency 4, 8, and 16.",
        "Sweep conc [4, 8, 12, 16].",
        "LMCache points c12/c16 around the knee.",
        "TP8 conc 1-12.",
        "conc-list: [2]",
    ],
)
def test_concurrencies_are_read_in_the_ways_people_write_them(says):
    assert codes(says) == [PlanCode.DESCRIBED_CONCURRENCY]


@pytest.mark.parametrize(
    "says",
    [
        "Add points at concurrency 4, 8, and 12.",
        "TP8 conc 4-12 with LMCache 0.5.4rc2.",
        "Replace the concurrency list [1, 4, 16] with [4, 8, 10, 12].",
        "Drop concurrency 16 and 24.",
        "Validated at concurrency 64 on the node.",
        "LMCache v0.5.4rc2 with 64 sessions and chunk size 16.",
        "Set max-num-seqs to 2x concurrency.",
        "Cover conc<=64 later.",
    ],
)
def test_prose_that_contradicts_nothing_is_left_alone(says):
    assert codes(says) == []


def test_a_clause_is_held_against_the_backends_that_it_names():
    both = space(
        "dsv4-lmcache",
        agentic("tp: 8, kv-offloading: none, conc-list: [1, 2]", f"tp: 8, {LMCACHE}, conc-list: [8, 16]"),
    )
    assert codes("LMCache at conc [8, 16]; GPU-resident and LMCache at conc [1, 8].", both) == []
    assert codes("LMCache at conc [1, 8].", both) == [PlanCode.DESCRIBED_CONCURRENCY]


@pytest.mark.parametrize(
    ("says", "code"),
    [
        ("Add LMCache 0.5.3.", [PlanCode.DESCRIBED_VERSION]),
        ("Add LMCache==0.5.4rc2.", []),
        ("Move LMCache 0.5.3 to LMCache 0.5.4rc2.", []),
        ("Serve with vLLM v0.26.0.", [PlanCode.DESCRIBED_VERSION]),
        ("Serve with vLLM v0.27.1.", []),
        ("Image vllm/vllm-openai:v0.26.0", [PlanCode.DESCRIBED_IMAGE]),
        ("Image vllm/vllm-openai:v0.27.1, was vllm/vllm-openai:v0.26.0", []),
        ("Add a Mooncake arm.", [PlanCode.DESCRIBED_BACKEND]),
        ("Add an LMCache arm.", []),
        ("The version is consumed by the script via KV_OFFLOAD_BACKEND_METADATA.", [PlanCode.UNCHECKABLE_CLAIM]),
        ("DO NOT MERGE: LMCache probe", [PlanCode.UNFINISHED]),
        ("[WIP] LMCache probe", [PlanCode.UNFINISHED]),
    ],
)
def test_versions_images_backends_and_marks_of_a_description_are_checked(says, code):
    assert codes(says) == code


def test_a_version_that_the_search_space_does_not_declare_is_checked_by_nothing():
    bare = KEY.replace(", version: 0.5.4rc2", "")
    (item,) = findings(log(entry("dsv4-lmcache", says="Add LMCache 0.5.3.")), bare)
    assert item.code == PlanCode.DESCRIBED_VERSION
    assert "declares no version" in item.found


# ------------------------------------------------------------------------------------------------------------ the link
@pytest.mark.parametrize("pull", ["XXX", "TBD", "0", "12/changes"])
def test_a_placeholder_link_is_found(pull):
    (item,) = findings(log(entry("dsv4-lmcache", pull=pull)), KEY)
    assert (item.code, item.line) == (PlanCode.PLACEHOLDER_LINK, 5)


def test_X4_a_link_copied_from_another_entry_is_found():
    other = space("dsv4-none", agentic("tp: 8, kv-offloading: none, conc-list: [1]"))
    entries = log(entry("dsv4-none", pull=7), entry("dsv4-lmcache", pull=7))
    (item,) = findings(entries, KEY, other)
    assert (item.code, item.line) == (PlanCode.COPIED_LINK, 10)
    (item,) = findings(entries, KEY, other, older=entries[:1])
    assert item.code == PlanCode.COPIED_LINK
    assert findings(log(entry("dsv4-none", pull=7), entry("dsv4-lmcache", pull=8)), KEY, other) == []
    assert findings(log(entry("dsv4-lmcache", pull=7), entry("dsv4-lmcache", pull=7)), KEY) == []


# ------------------------------------------------------------------------------------------------------------ the rows
def test_X8_two_lines_that_expand_to_one_point_are_found_with_both_places():
    twice = space(
        "dsv4-lmcache", agentic(f"tp: 8, {LMCACHE}, conc-list: [4, 8]", f"tp: 8, {LMCACHE}, conc-list: [8, 16]")
    )
    (item,) = findings(log(entry("dsv4-lmcache")), twice)
    assert (item.code, item.line) == (PlanCode.SAME_POINT, 13)
    assert "conc 8 of dsv4-lmcache is the same point as in master.yaml:12" in item.found
    within = space("dsv4-lmcache", agentic(f"tp: 8, {LMCACHE}, conc-list: [4, 4]"))
    assert [item.code for item in findings(log(entry("dsv4-lmcache")), within)] == [PlanCode.SAME_POINT]
    of_two_keys = [KEY, KEY.replace("dsv4-lmcache:", "dsv4-copy:")]
    assert len(findings(log(entry("dsv4-lmcache", "dsv4-copy")), *of_two_keys)) == 4


def test_two_points_with_one_name_are_found_once_for_two_lines():
    text = agentic(f"tp: 8, {LMCACHE}, conc-list: [4, 8]", f"tp: 8, ep: 8, dp-attn: true, {LMCACHE}, conc-list: [4, 8]")
    (item,) = findings(log(entry("dsv4-lmcache")), space("dsv4-lmcache", text))
    assert (item.code, item.line) == (PlanCode.SAME_NAME, 13)
    assert "dsv4_tp8_conc4_kvdram-lmcache names a point of line 12 too" in item.found


def test_X10_an_entry_that_selects_nothing_is_found():
    lengths = space("dsv4-lmcache", fixed("tp: 8, conc-list: [4]"))
    wanted = entry("dsv4-lmcache", more="  scenario-type: [agentic-coding]\n")
    (item,) = findings(log(wanted), lengths)
    assert item.code == PlanCode.NOTHING_SELECTED
    assert "wants agentic-coding, and its config keys have only fixed-seq-len" in item.found
    (item,) = lint(log(entry("dsv5-*")), master(KEY), runners(), [])
    assert item.code == PlanCode.NOTHING_SELECTED


def test_a_runner_without_hardware_facts_is_found():
    bare = space("dsv4-lmcache", agentic("tp: 8, kv-offloading: none, conc-list: [1, 2]"), runner="cluster:bare")
    (item,) = findings(log(entry("dsv4-lmcache")), bare)
    assert (item.code, item.line) == (PlanCode.NO_HARDWARE, 7)
    assert "known: cluster:b200-dgxc, cluster:gb200-nv" in item.do


def test_a_budget_that_exceeds_the_node_is_found():
    found, facts, entries = master(KEY), runners(), log(entry("dsv4-lmcache"))
    rows = [
        replace(item, row=item.row.model_copy(update={"total_cpu_dram_gb": 9999}))
        for item in expand(entries, found, facts).rows
    ]
    (item,) = lint(entries, found, facts, rows)
    assert item.code == PlanCode.BUDGET_ABOVE_NODE
    assert "budget of 9999 GB for 8 GPUs on a node of 8 GPUs and 3246 GB" in item.found


def test_tabs_and_carriage_returns_are_found(tmp_path):
    path = tmp_path / "x.yaml"
    assert [(item.code, item.line) for item in lint_text(path, b"a: 1\nb: x\ty\r\nc: 1\r\n")] == [
        (PlanCode.TAB, 2),
        (PlanCode.CARRIAGE_RETURN, 2),
    ]
    assert lint_text(path, b"a: 1\nb: 2\n") == []


def test_strict_makes_errors_of_all_findings():
    found = findings(log(entry("dsv4-lmcache", pull="XXX", says="conc 4/16")), KEY)
    with pytest.raises(InputError) as caught:
        refuse(found)
    assert str(caught.value).splitlines() == [item.message for item in found]
    assert len(found) == 2
    refuse([])


def test_the_documented_table_is_that_of_the_code(project):
    text = (project / "docs" / "write-an-entry.md").read_text()
    between = text.split("<!-- findings: generated from workflow/lint.py -->\n")[1].split("<!-- /findings -->")[0]
    assert between == codes_table()


# ---------------------------------------------------------------------------------------------------------- real ones
def test_the_real_pull_requests_are_caught(shared, tmp_path):
    from workflow.changelog import changes_of_texts  # noqa: PLC0415
    from workflow.inferencex_matrix import configs_of  # noqa: PLC0415

    unpack(shared / "inferencex" / "matrix-cases.tar.xz", tmp_path)
    said = {}
    for case in (path.parent for path in tmp_path.rglob("expected.json")):
        paths = [case / side / "perf-changelog.yaml" for side in ("base", "head")]
        added = [change.new for change in changes_of_texts(*((path, path.read_bytes()) for path in paths))]
        configs = configs_of(case / "head")
        rows = expand(added, configs.master, configs.runners)
        all_rows = [*rows.rows, *rows.not_runnable]
        found = lint(added, configs.master, configs.runners, all_rows)
        said[case.name] = sorted({item.code.value for item in found})
    # 2598: conc 4/8/16 for [4, 8, 10, 12], and a version that no script takes.
    assert said.pop("96783731b") == ["claim_that_nothing_checks", "described_concurrency_differs"]
    # 2231: two topologies that InferenceX writes under one name.
    assert said.pop("01e9e73a2") == ["one_name_for_two_points"]
    assert said.pop("39324e441") == ["described_concurrency_differs"]
    assert said.pop("077d48325") == ["placeholder_link"]
    assert said.pop("1a549a352") == ["copied_link"]
    assert {json.dumps(codes) for codes in said.values()} == {"[]", '["one_name_for_two_points"]'}


def test_the_description_of_2231_contradicts_the_ladder_that_was_planned_first(shared):
    log_path = shared / "inferencex" / "perf-changelog.yaml"
    from workflow.changelog import load_changelog  # noqa: PLC0415

    (merged,) = [item for item in load_changelog(log_path) if item.entry.pr_link.endswith("/2231")]
    first = space(
        "dsv4-fp4-b200-vllm-agentic",
        agentic(
            f"tp: 8, {LMCACHE.replace('0.5.4rc2', '0.5.1')}, conc-list: [8, 12, 16]",
            f"tp: 8, ep: 8, dp-attn: true, {LMCACHE.replace('0.5.4rc2', '0.5.1')}, "
            "conc-list: [8, 16, 24, 32, 40, 48, 56, 64, 68, 72, 80]",
        ),
    )
    found, facts = master(first), runners()
    rows = expand([merged], found, facts).rows
    said = [item for item in lint([merged], found, facts, rows) if item.code == PlanCode.DESCRIBED_CONCURRENCY]
    assert len(said) == 1
    assert "nothing measures 20, 28, 36, 44, 52, 60, 76" in said[0].do
