import pytest
from hypothesis import given
from hypothesis import strategies as st
from spaces import agentic, entry, fixed, log, master, runners, space, worker

from workflow.contract import InputError
from workflow.searchspace import Hardware, dram_budget_gb, gpus_on_one_node, parse_runners, resolve_keys

NONE = "tp: 8, kv-offloading: none, conc-list: [1]"


@pytest.mark.parametrize(
    ("mib", "per_node", "share", "gpus", "gb"),
    [
        # The table of section 0.4 of the reference: b200, b300, h100, h200, mi300x, mi355x.
        (3_095_781, 8, 0.80, 8, 2399),
        (3_095_781, 8, 0.80, 4, 1199),
        (3_095_781, 8, 0.80, 2, 599),
        (3_095_781, 8, 0.95, 8, 2849),
        (3_095_781, 8, 1.0, 4, 1499),
        (2_964_436, 8, 0.75, 8, 2249),
        (2_964_436, 8, 0.683, 4, 1024),
        (2_964_436, 8, 1.0, 2, 749),
        (2_063_837, 8, 0.8, 8, 1731),
        (1_471_356, 8, 0.8, 8, 1234),
        (2_321_924, 8, 0.8, 8, 1947),
        (3_095_781, 8, 0.14, 4, 209),
        (3_095_781, 8, 0.086, 8, 257),
    ],
)
def test_the_budget_is_that_of_inferencex(mib, per_node, share, gpus, gb):
    facts = Hardware.model_validate({"available-cpu-dram-mib": mib, "gpus-per-node": per_node})
    assert dram_budget_gb(facts, share, gpus) == gb


@given(st.integers(1, 4_000_000), st.integers(1, 1000), st.sampled_from([1, 2, 4, 8]))
def test_a_budget_stays_on_the_node_and_is_exact(mib, thousandths, gpus):
    facts = Hardware.model_validate({"available-cpu-dram-mib": mib, "gpus-per-node": 8})
    budget = dram_budget_gb(facts, thousandths / 1000, gpus)
    exact = min(mib, 2_861_022) * 1_048_576 * thousandths * gpus
    assert budget == exact // (1000 * 8 * 10**9)
    assert budget * 10**9 <= mib * 1_048_576


@pytest.mark.parametrize(("tp", "gpus"), [(1, 1), (2, 2), (4, 4), (8, 4), (16, 4)])
def test_a_worker_takes_its_part_of_a_node_or_all_of_it(tp, gpus):
    found = master(space("a", fixed(f"prefill: {worker(tp)}, decode: {worker(4)}, conc-list: [1]"), multinode=True))
    prefill = found.search_space("a").scenarios.fixed_seq_len[0].search_space[0].prefill
    assert gpus_on_one_node(prefill, 4) == gpus


@pytest.mark.parametrize("tp", [3, 6])
def test_a_worker_that_does_not_tile_its_nodes_is_refused(tp):
    found = master(space("a", fixed(f"prefill: {worker(tp)}, decode: {worker(4)}, conc-list: [1]"), multinode=True))
    prefill = found.search_space("a").scenarios.fixed_seq_len[0].search_space[0].prefill
    with pytest.raises(ValueError, match=f"a worker of {tp} GPUs does not tile nodes of 4"):
        gpus_on_one_node(prefill, 4)


PAIR = f"prefill: {worker(4)}, decode: {worker(4)}"
NO_BACKEND = "tp: 8, kv-offloading: dram, conc-list: [1]"
BACKEND = "kv-offload-backend: {name: lmcache}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (space("a", agentic(NO_BACKEND)), "kv-offload-backend is required with kv-offloading: dram"),
        (space("a", agentic(f"{NONE}, {BACKEND}")), "not allowed with kv-offloading: none"),
        (space("a", agentic("tp: 8, conc-list: [1]")), "kv-offloading is missing; allowed: none, dram"),
        (space("a", agentic(f"{NO_BACKEND}, {BACKEND}", utilization=None)), "needs a dram-utilization"),
        (space("a", agentic(f"{NO_BACKEND}, {BACKEND}", utilization=1.2)), "less than or equal to 1"),
        (space("a", agentic("tp: 8, kv-offloading: none")), "either conc-list, or both conc-start and conc-end"),
        (space("a", agentic(f"{NONE}, conc-start: 1, conc-end: 2")), "either conc-list, or both"),
        (space("a", agentic("tp: 8, kv-offloading: none, conc-start: 1")), "either conc-list, or both"),
        (space("a", agentic("tp: 8, kv-offloading: none, conc-start: 4, conc-end: 2")), "is above conc-end 2"),
        (space("a", agentic("tp: 8, kv-offloading: none, conc-list: [0]")), "a concurrency is at least 1"),
        (
            space("a", agentic("tp: 8, dcp-size: 3, kv-offloading: none, conc-list: [1]")),
            "not a multiple of dcp-size 3",
        ),
        (space("a", agentic(NONE), runner="b200"), "agentic-coding needs one cluster, written cluster:<name>"),
        (space("a", agentic(NONE), multinode=True), "needs prefill and decode in every line"),
        (space("a", agentic(f"{PAIR}, conc-list: [1]")), "needs tp in every line"),
        (space("a", agentic(f"tp: 8, {PAIR}, conc-list: [1]")), "either tp (one node), or both prefill and decode"),
        (space("a", agentic(f"prefill: {worker(4)}, conc-list: [1]")), "either tp (one node), or both"),
        (space("a", fixed(f"pp: 2, {PAIR}, conc-list: [1]"), multinode=True), "belong into prefill and decode"),
        (
            space(
                "a", agentic(f"{NONE}, router: {{name: r, version: '1'}}"), more="  router: {name: r, version: '1'}\n"
            ),
            "router stands here and in a line",
        ),
        (space("a", agentic(f"{NONE}, router: {{name: r}}")), "version: missing key"),
        (space("a", agentic(f"{NO_BACKEND}, kv-offload-backend: {{name: x, version: 'image:x'}}")), "not an image"),
        (
            space("a", fixed(f"{PAIR}, conc-list: [1]"), multinode=True, more="  disagg: true\n"),
            "needs kv-p2p-transfer",
        ),
        (space("a", fixed("tp: 8, conc-list: [1]"), more="  disagg: true\n"), "need multinode: true"),
        (space("a", "    {}\n"), "give agentic-coding, fixed-seq-len, or both"),
        (space("a", agentic(f"{NONE}, conc_list: [1]")), "did you mean 'conc-list'?"),
        (space("a", agentic("tp: '8', kv-offloading: none, conc-list: [1]")), "found '8'"),
    ],
)
def test_a_search_space_that_does_not_fit_is_said_with_its_line(text, words):
    with pytest.raises(InputError) as caught:
        master(text).search_space("a")
    assert words in str(caught.value)
    assert str(caught.value).startswith("master.yaml:")


def test_a_bad_key_that_nobody_selects_hurts_nobody():
    found = master(space("bad", agentic(NO_BACKEND)), space("good", agentic(NONE)))
    assert found.search_space("good").model == "org/Model"


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (("- 1\n",), "no config keys"),
        (("a*: {}\n",), "cannot be a config key"),
        (("1: {}\n",), "cannot be a config key"),
    ],
)
def test_what_is_no_master_file_is_refused(texts, words):
    with pytest.raises(InputError, match=words):
        master(*texts)


def test_a_runners_file_that_is_none_is_refused(tmp_path):
    with pytest.raises(InputError, match="not a mapping"):
        parse_runners(tmp_path / "runners.yaml", b"[]")
    with pytest.raises(InputError, match="gpus-per-node"):
        runners("labels: {}\nhardware: {x: {available-cpu-dram-mib: 1, gpus-per-node: 0}}\n")


def test_a_key_without_a_match_is_answered_with_the_nearest():
    found = master(space("dsv4-fp4-b200", agentic(NONE)))
    with pytest.raises(InputError, match="did you mean 'dsv4-fp4-b200'"):
        resolve_keys(log(entry("dsv4-fp4-b20"))[0], found)
