"""Why an arm won or lost, in numbers; and what the arms differ in."""

import numpy as np
import pandas as pd
import pytest

from tests.examples import synthetic
from workflow.comparison import compare
from workflow.explanation import explain
from workflow.fairness import fairness_table


@pytest.fixture(scope="module")
def made_up():
    points, table, requests = synthetic.sweep()
    return points, table, compare(table, requests).pairs


def said(table, pairs, arm="vllm-native", concurrency=16, entry=1):
    group = table[table["entry"] == entry]["group"].iloc[0]
    wanted = (pairs["group"] == group) & (pairs["concurrency"] == concurrency)
    pairs = pairs[wanted & (pairs["arm"] == arm) & (pairs["against"] == "none")]
    found = explain(table, pairs)
    return {topic: " ".join(rows["says"]) for topic, rows in found.groupby("topic", sort=False)}


def changed(table, arm, **values):
    table = table.copy()
    for name, value in values.items():
        table.loc[table["arm"] == arm, name] = value
    return table


def test_every_topic_has_its_numbers(made_up):
    _, table, pairs = made_up
    found = said(table, pairs)
    row = table[(table["arm"] == "vllm-native") & (table["concurrency"] == 16) & (table["entry"] == 1)].iloc[0]
    assert f"{row['prompt_share_host']:.1%} from host" in found["tokens by source"]
    assert "46 GB/s while it copied, 72% of the bus (64 GB/s one way)" in found["transfers"]
    assert "slow" not in found["transfers"]
    assert "Ceiling of the sessions: 93.0%" in found["ceiling"]
    assert "of copies to the device a request" in found["prefill"]
    assert "longer than none" in found["start-up"]
    assert "vllm-native costs" in found["decoding"]


def test_a_slow_copy_and_a_full_pool_are_named(made_up):
    _, table, pairs = made_up
    found = said(table, pairs, "mooncake")
    assert "slow, so the memory is not pinned or the blocks are small" in found["transfers"]
    assert "was full in none" in found["pressure"]


def test_a_store_that_is_asked_over_and_over_is_named_with_the_time_it_takes(made_up):
    _, table, pairs = made_up
    asked = {"succeeded": 100.0, "window_s": 45.0, "drain_s": 10.0, "store_lookups": 5400.0, "store_lookup_s": 7.3}
    found = said(changed(table, "mooncake", **asked), pairs, "mooncake")["lookups"]
    assert "asked 5,400 times which blocks it holds, 54 times a request" in found
    assert "took 7.3 s of 55 s of window and drain" in found
    for few in ({"store_lookups": 300.0}, {"store_lookups": np.nan}):
        assert "lookups" not in said(changed(table, "mooncake", **(asked | few)), pairs, "mooncake")


def test_a_working_set_that_fits_leaves_nothing_to_win(made_up):
    _, table, pairs = made_up
    found = said(changed(table, "none", device_kv_use_max_share=0.4), pairs)
    assert "at most 40% full in none" in found["pressure"]


def test_a_workload_without_reuse_shows_what_the_backend_costs(made_up):
    _, table, pairs = made_up
    found = said(changed(table, "vllm-native", ceiling_share=0.01), pairs)
    assert "what vllm-native costs where it cannot help" in found["ceiling"]


def test_the_same_share_of_computed_tokens_is_said_to_save_nothing(made_up):
    _, table, pairs = made_up
    same = table[table["arm"] == "none"].groupby("concurrency")["cached_share"].first()[16]
    assert "saved no prefill" in said(changed(table, "vllm-native", cached_share=same), pairs)["prefill"]


def test_what_is_not_known_is_not_mentioned(made_up):
    _, table, pairs = made_up
    numbers = [name for name in table.select_dtypes("number") if name not in ("concurrency", "repeat", "entry")]
    assert said(table.assign(**dict.fromkeys(numbers, np.nan)), pairs).keys() == {"verdict", "decoding"}


def test_a_refused_pair_says_why_and_nothing_else(made_up):
    _, table, pairs = made_up
    assert said(table, pairs, "lmcache", 64) == {
        "verdict": "lmcache against none: not comparable (lmcache failed: engine_died)"
    }


def test_the_fairness_table_lists_what_the_plans_differ_in_and_where(made_up):
    points, table, _ = made_up
    found = fairness_table(points, table)
    native = found[(found["arm"] == "vllm-native") & (found["where"] == "engine argv")]
    assert "--kv-transfer-config" in set(native["name"])
    assert set(native["concurrencies"]) == {"16, 32", "8, 16, 32, 64"}
    assert "none" not in set(found["arm"])


def test_G19_another_block_size_and_host_memory_are_listed_with_both_values(made_up):
    points, table, _ = made_up

    def with_block_size(point, tokens):
        argv = list(point.plan.engine.argv)
        argv[argv.index("--block-size") + 1] = tokens
        engine = point.plan.engine.model_copy(update={"argv": tuple(argv)})
        return point.model_copy(update={"plan": point.plan.model_copy(update={"engine": engine})})

    changed = [with_block_size(one, "64" if one.arm == "vllm-native" else "16") for one in points]
    found = fairness_table(changed, table)
    native = found[found["arm"] == "vllm-native"].set_index("name")
    sizes = native.loc[["--block-size"], ["against_value", "value"]].drop_duplicates()
    assert sizes.to_numpy().tolist() == [["16", "64"]]
    assert "host memory" in set(native["where"])
    assert "--block-size" not in set(found[found["arm"] == "lmcache"]["name"])


def test_another_node_and_arms_that_did_not_take_turns_are_seen(made_up):
    points, table, _ = made_up
    order = {"none": 0.0, "vllm-native": 100.0, "lmcache": 200.0, "mooncake": 300.0}
    blocks = table.assign(started_unix_s=table["arm"].map(order) + table["repeat"])
    blocks.loc[blocks["arm"] == "lmcache", "node"] = "other-node"
    found = fairness_table(points, blocks)
    seen = found[found["where"] == "seen"]
    assert seen[(seen["arm"] == "lmcache") & (seen["name"] == "node")]["value"].tolist() == ["other-node"]
    assert "all of none, then all of vllm-native" in set(seen[seen["name"] == "order of runs"]["value"])
    assert fairness_table(points, table).query("name == 'order of runs'").empty


def test_without_a_control_nothing_is_listed(made_up):
    points, table, _ = made_up
    alone = [point for point in points if point.arm != "none"]
    assert fairness_table(alone, table[table["arm"] != "none"]).empty
    assert isinstance(fairness_table([], table.iloc[:0]), pd.DataFrame)
