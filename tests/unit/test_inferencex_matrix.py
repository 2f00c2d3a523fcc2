"""InferenceX's rules that its 25 recorded changes do not reach, on small search spaces."""

import hashlib
import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spaces import agentic, entry, fixed, log, master, runners, space, worker

from workflow.contract import InputError
from workflow.inferencex_matrix import inferencex_matrix
from workflow.matrix import expand, plan_rows
from workflow.searchspace import Configs, resolve_keys

RESIDENT = "kv-offloading: none"
LMCACHE = "kv-offloading: dram, kv-offload-backend: {name: lmcache}"


def configs(*texts):
    return Configs(master(*texts), runners())


def matrix(entries, *texts, base=()):
    return inferencex_matrix(entries, configs(*texts), configs(*(base or texts)))


def concs(rows):
    return [row["conc"] for row in rows]


def on_nodes(key, *lines, scenario=agentic, more="  disagg: true\n  kv-p2p-transfer: nixl\n", **rest):
    body = scenario(*lines, utilization=0.5) if scenario is agentic else fixed(*lines)
    return space(key, body, runner="cluster:gb200-nv", multinode=True, more=more, **rest)


# ---------------------------------------------------------------------------------------------------- concurrencies
@given(st.integers(1, 300), st.integers(0, 900))
def test_a_range_doubles_and_always_ends_at_its_end(start, more):
    end = start + more
    rows = matrix(log(entry("a")), space("a", fixed(f"tp: 8, conc-start: {start}, conc-end: {end}"), runner="b200"))
    steps = concs(rows["single_node"]["8k1k"])
    assert (steps[0], steps[-1]) == (start, end)
    assert all(b == 2 * a for a, b in itertools.pairwise(steps[:-1]))
    assert steps == sorted(set(steps))


def test_a_multi_node_line_is_one_job_with_fixed_lengths_and_one_per_concurrency_in_agentic():
    line = f"prefill: {worker(4)}, decode: {worker(4, num=2)}, conc-list: [4, 8]"
    rows = matrix(log(entry("a", "b")), on_nodes("a", line, scenario=fixed), on_nodes("b", f"{line}, {LMCACHE}"))
    assert concs(rows["multi_node"]["8k1k"]) == [[4, 8]]
    assert concs(rows["multi_node"]["agentic"]) == [[4], [8]]
    first = rows["multi_node"]["agentic"][0]
    assert first["exp-name"] == "dsv4_p1x4_d2x4_conc4_kvdram-lmcache"
    # 860160 MiB * 0.5, all four GPUs of the node.
    assert first["total-cpu-dram-gb"] == 450


@pytest.mark.parametrize(
    ("isl", "osl", "name"), [(1024, 1024, "1k1k"), (8192, 1024, "8k1k"), (1024, 8192, "1024_8192")]
)
def test_lengths_are_named_and_make_the_context(isl, osl, name):
    rows = matrix(log(entry("a")), space("a", fixed("tp: 8, conc-list: [4]", isl=isl, osl=osl), runner="b200"))
    (row,) = rows["single_node"][name]
    assert (row["exp-name"], row["max-model-len"], row["run-eval"], row["eval-only"]) == (
        f"dsv4_{name}",
        isl + osl + 256,
        False,
        False,
    )


def test_the_fingerprint_is_of_the_row_before_defaults_and_without_its_concurrency():
    line = f"prefill: {worker(4)}, decode: {worker(4)}, conc-list: [4, 8]"
    rows = matrix(log(entry("a")), on_nodes("a", line))["multi_node"]["agentic"]
    assert rows[0]["decode"]["additional-settings"] == []
    assert rows[0]["recipe-fingerprint"] == rows[1]["recipe-fingerprint"]
    recipe = {name: value for name, value in rows[0].items() if name not in ("conc", "exp-name", "recipe-fingerprint")}
    for role in ("prefill", "decode"):
        recipe[role] = {name: value for name, value in recipe[role].items() if name != "additional-settings"}
    text = json.dumps(recipe, sort_keys=True, separators=(",", ":"))
    assert rows[0]["recipe-fingerprint"] == hashlib.sha256(text.encode()).hexdigest()


# ------------------------------------------------------------------------------------------------------------- evals
def test_fixed_evals_are_the_highest_and_the_median_concurrency_of_each_attention():
    lines = ["tp: 8, conc-list: [4, 8, 16, 32, 64]", "tp: 4, conc-list: [64]", "tp: 8, dp-attn: true, conc-list: [16]"]
    short = fixed("tp: 8, conc-list: [64]", isl=1024).replace("    fixed-seq-len:\n", "")
    rows = matrix(log(entry("a")), space("a", fixed(*lines) + short, runner="b200"))
    # 16, 32, 64 count (below 16 none do): the median is 32.
    assert [(row["tp"], row["conc"], row["dp-attn"]) for row in rows["evals"]] == [
        (8, 32, False),
        (8, 64, False),
        (4, 64, False),
        (8, 16, True),
    ]
    assert all(row["run-eval"] and row["eval-only"] and "recipe-fingerprint" not in row for row in rows["evals"])


def test_the_median_of_an_even_number_of_concurrencies_is_the_upper_one():
    rows = matrix(log(entry("a")), space("a", fixed("tp: 8, conc-list: [128, 16, 32, 64]"), runner="b200"))
    assert concs(rows["evals"]) == [128, 64]


def test_one_agentic_eval_for_a_deployment_even_over_several_keys_of_an_entry():
    first = space("a", agentic(f"tp: 8, {RESIDENT}, conc-list: [1, 8]"))
    second = space("b", agentic(f"tp: 4, {RESIDENT}, conc-list: [8, 2]"))
    together = matrix(log(entry("a", "b")), first, second)["agentic_evals"]
    assert [(row["tp"], row["conc"]) for row in together] == [(8, 8)]
    apart = matrix(log(entry("a"), entry("b")), first, second)["agentic_evals"]
    assert [(row["tp"], row["conc"]) for row in apart] == [(8, 8), (4, 8)]


def test_multi_node_evals_are_the_highest_concurrency_of_each_topology_from_16_on():
    narrow = f"prefill: {worker(4)}, decode: {worker(4)}, conc-list: [8, 16, 32]"
    wide = f"prefill: {worker(4, ep=4)}, decode: {worker(4)}, conc-list: [4, 8]"
    spaces = [on_nodes("a", narrow, wide), on_nodes("b", narrow, wide, scenario=fixed)]
    rows = matrix(log(entry("a", "b")), *spaces)
    assert [(row["conc"], row["eval-conc"]) for row in rows["multinode_agentic_evals"]] == [([32], 32)]
    assert [(row["conc"], row["eval-conc"], row["eval-all-concs"]) for row in rows["multinode_evals"]] == [
        ([8, 16, 32], 32, False)
    ]


def test_all_evals_takes_every_point_and_joins_the_rows_of_a_topology():
    line = f"prefill: {worker(4)}, decode: {worker(4)}"
    spaces = [
        space("a", agentic(f"tp: 8, {RESIDENT}, conc-list: [1, 8]")),
        space("b", fixed("tp: 8, conc-list: [4, 8]"), runner="b200"),
        space("c", fixed("tp: 8, conc-list: [4, 8]", isl=1024), runner="b200"),
        on_nodes("d", f"{line}, conc-list: [8, 2]", f"{line}, conc-list: [4]"),
        on_nodes("e", f"{line}, conc-list: [8, 2]", f"{line}, conc-list: [4]", scenario=fixed),
    ]
    rows = matrix(log(entry("*", more="  all-evals: true\n")), *spaces)
    assert (rows["single_node"], rows["multi_node"]) == ({}, {})
    assert concs(rows["agentic_evals"]) == [1, 8]
    assert concs(rows["evals"]) == [4, 8]
    assert [(row["conc"], row["eval-conc"]) for row in rows["multinode_agentic_evals"]] == [([2, 4, 8], 8)]
    (batched,) = rows["multinode_evals"]
    assert (batched["conc"], batched["eval-all-concs"], "eval-conc" in batched) == ([2, 4, 8], True, False)


def test_all_evals_wins_over_an_earlier_entry_and_leaves_its_measurement():
    one = space("a", agentic(f"tp: 8, {RESIDENT}, conc-list: [1, 8]"))
    rows = matrix(log(entry("a", pull=1), entry("a", pull=2, more="  all-evals: true\n")), one)
    assert concs(rows["single_node"]["agentic"]) == [1, 8]
    assert concs(rows["agentic_evals"]) == [1, 8]
    assert [item["pr-link"][-1] for item in rows["changelog_metadata"]["entries"]] == ["1", "2"]


def test_evals_only_measures_nothing():
    one = space("a", agentic(f"tp: 8, {RESIDENT}, conc-list: [1, 8]"))
    rows = matrix(log(entry("a", more="  evals-only: true\n")), one)
    assert (rows["single_node"], concs(rows["agentic_evals"])) == ({}, [8])


def test_evals_of_workers_with_too_few_experts_are_left_out():
    lines = [f"prefill: {worker(4, ep=ep)}, decode: {worker(4)}, conc-list: [32]" for ep in (1, 4, 8)]
    rows = matrix(log(entry("a", more="  eval-min-prefill-ep: 4\n")), on_nodes("a", *lines))
    assert [row["prefill"]["ep"] for row in rows["multinode_agentic_evals"]] == [4, 8]
    assert len(rows["multi_node"]["agentic"]) == 3


# ----------------------------------------------------------------------------------------------------------- entries
def test_entries_with_other_scenarios_of_one_key_do_not_hide_each_other():
    both = space("a", fixed("tp: 8, conc-list: [4]") + agentic(f"tp: 8, {RESIDENT}, conc-list: [1]"))
    first = entry("a", more="  scenario-type: [agentic-coding]\n")
    rows = matrix(log(first, entry("a"), entry("a")), both)
    assert [(name, concs(listed)) for name, listed in rows["single_node"].items()] == [("agentic", [1]), ("8k1k", [4])]


def test_wildcards_are_expanded_in_the_order_of_the_files_and_match_whole_keys():
    spaces = [
        space(key, agentic(f"tp: 8, {RESIDENT}, conc-list: [{i}]")) for i, key in enumerate(("ab", "b", "abc"), 1)
    ]
    assert concs(matrix(log(entry("b", "a*")), *spaces)["single_node"]["agentic"]) == [2, 1, 3]
    assert concs(matrix(log(entry("*")), *spaces)["single_node"]["agentic"]) == [1, 2, 3]
    with pytest.raises(InputError, match=r"'a\.\*' matches no config key"):
        matrix(log(entry("a.*")), *spaces)


# ------------------------------------------------------------------------------------------------------- append-only
APPEND = "  append-only: true\n"
BEFORE = space("a", agentic(f"tp: 8, {RESIDENT}, conc-list: [1, 8]"))


def appended(after, before=BEFORE, entries=None):
    return matrix(entries or log(entry("a", more=APPEND)), after, base=(before,))


def test_append_only_gives_the_new_points_once_and_no_evals():
    after = space("a", agentic(f"tp: 8, {RESIDENT}, conc-list: [8, 2, 1, 2]", f"tp: 4, {RESIDENT}, conc-list: [1]"))
    rows = appended(after)
    assert [(row["tp"], row["conc"]) for row in rows["single_node"]["agentic"]] == [(8, 2), (4, 1)]
    assert rows["agentic_evals"] == []


def test_append_only_keeps_the_new_concurrencies_of_a_multi_node_job():
    line = f"prefill: {worker(4)}, decode: {worker(4)}"
    rows = appended(
        on_nodes("a", f"{line}, conc-list: [4, 16, 8]", scenario=fixed),
        on_nodes("a", f"{line}, conc-list: [4]", scenario=fixed),
    )
    assert concs(rows["multi_node"]["8k1k"]) == [[16, 8]]


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (BEFORE, "nothing was added"),
        (BEFORE.replace("[1, 8]", "[1, 2]"), r"concurrencies \[8\] of the base are gone"),
        (BEFORE.replace("tp: 8", "tp: 4"), "changed or removed"),
        (BEFORE.replace("[1, 8]", "[1, 8, 9]").replace("v0.27.1", "v0.28.0"), "changed or removed"),
        (
            BEFORE.replace("      dram", f"      - {{tp: 8, {LMCACHE}, conc-list: [9]}}\n      dram"),
            "continues no line",
        ),
        (BEFORE + space("b", agentic(f"tp: 8, {RESIDENT}, conc-list: [1]")), "b changed too"),
        (BEFORE + fixed("tp: 8, conc-list: [4]"), "a scenario was added or removed"),
    ],
)
def test_append_only_refuses_more_than_an_addition(after, words):
    with pytest.raises(InputError, match=words):
        appended(after)


def test_append_only_needs_a_base_and_its_own_change():
    after = BEFORE.replace("[1, 8]", "[1, 8, 9]")
    with pytest.raises(InputError, match="the base has no such config key"):
        appended(after.replace("a:\n", "c:\n", 1), entries=log(entry("c", more=APPEND)))
    with pytest.raises(InputError, match="cannot share a change"):
        appended(after, entries=log(entry("a", more=APPEND), entry("a")))


def test_our_own_plan_takes_the_same_additions_and_everything_without_a_base():
    after = BEFORE.replace("[1, 8]", "[1, 8, 9]")
    entries, head = log(entry("a", more=APPEND)), configs(after)
    assert [item.row.conc for item in plan_rows(entries, head.master, head.runners, configs(BEFORE))] == [9]
    assert [item.row.conc for item in plan_rows(entries, head.master, head.runners)] == [1, 8, 9]


def _known(item, head):
    """Whether the search spaces still have the keys of an entry."""
    try:
        return bool(resolve_keys(item, head.master))
    except InputError:
        return False


def test_both_views_measure_the_same_single_node_points(shared):
    """Every newest entry of the real log against today's search spaces."""
    from workflow.changelog import load_changelog  # noqa: PLC0415
    from workflow.inferencex_matrix import configs_of  # noqa: PLC0415

    folder = shared / "inferencex"
    head = configs_of(folder)
    planned = 0
    for item in load_changelog(Path(folder / "perf-changelog.yaml"))[-120:]:
        if item.entry.append_only or not _known(item, head):
            continue
        printed = inferencex_matrix([item], head, head)
        ours = expand([item], head.master, head.runners)
        theirs = printed["single_node"].get("agentic", [])
        assert [(row.row.exp_name, row.row.conc) for row in ours.rows] == [
            (row["exp-name"], row["conc"]) for row in theirs
        ]
        measured = sum(len(rows) for kind in ("single_node", "multi_node") for rows in printed[kind].values())
        assert len(ours.rows) + len(ours.not_runnable) == measured or item.entry.evals_only or item.entry.all_evals
        for rows in (*printed["single_node"].values(), *printed["multi_node"].values()):
            assert all(len(row["recipe-fingerprint"]) == 64 for row in rows)
        planned += len(ours.rows)
    assert planned > 300
