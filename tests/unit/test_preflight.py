import json
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.unit.arms import RUNNERS, plan, planned
from workflow import preflight, yamlfile
from workflow.matrix import Row, Runners
from workflow.node import NodeFacts, PathFacts, declared_facts
from workflow.preflight import RULES, check
from workflow.serving import GB, GIB, Blocker, CacheFacts, ServePlan, without_flags


@dataclass(frozen=True)
class Case:
    """A sound arm on a sound node; `mutate` returns it with one mistake."""

    row: Row
    plan: ServePlan
    node: NodeFacts
    layers: int | None = None

    def codes(self) -> set[str]:
        return {finding.code for finding in check(self.row, self.plan, self.node, layers=self.layers)}


def case(key: str, backend: str = "none", version: str | None = "1.0", *, dp_attn: bool = False) -> Case:
    found = plan(key, backend, version, dp_attn=dp_attn)
    row = planned(key, backend, version, dp_attn=dp_attn).row
    good = PathFacts(exists=True, shards_named=3, shards_missing=0, has_config=True)
    node = NodeFacts(
        gpu=row.runner.removeprefix("cluster:").split("-")[0],
        gpus_visible=row.gpus,
        gpu_memory_used_share=0.02,
        driver_major=580,
        cores=128,
        dram_total_bytes=3200 * GB,
        dram_available_bytes=3100 * GB,
        cgroup_limit_bytes=3150 * GB,
        shm_size_bytes=3000 * GB,
        shm_free_bytes=3000 * GB,
        shm_leftovers=(),
        memlock_bytes=-1,
        open_files=65536,
        free_ports=1000,
        scratch_free_bytes=30_000 * GB,
        rdma_active=tuple(f"mlx5_{i}" for i in range(12)),
        env={},
        packages={name.partition("==")[0]: version or "" for name in found.packages if version}
        | {"vllm-router": "0.1.14"},
        paths=dict.fromkeys(found.wants, good),
    )
    return Case(row, found, node)


# What a mutation may change -------------------------------------------------------------------------------------------
def node(**facts: Any):
    return lambda c: replace(c, node=c.node.model_copy(update=facts))


def fields(**values: Any):
    return lambda c: replace(c, plan=c.plan.model_copy(update=values))


def row(**values: Any):
    return lambda c: replace(c, row=c.row.model_copy(update=values))


def service(name: str, *, drop: tuple[str, ...] = (), add: tuple[str, ...] = (), env: dict | None = None, unset=None):
    """Change the argv and env of one service; an env value of None removes the variable."""

    def changed(one):
        if one is None or one.name != name:
            return one
        merged = {key: value for key, value in {**one.env, **(env or {})}.items() if value is not None}
        update: dict[str, Any] = {"argv": (*without_flags(one.argv, drop), *add), "env": merged}
        if unset is not None:
            update["unset"] = unset
        return one.model_copy(update=update)

    def mutate(c):
        parts = {"engine": changed(c.plan.engine), "router": changed(c.plan.router)}
        return fields(**parts, sidecars=tuple(changed(one) for one in c.plan.sidecars))(c)

    return mutate


def connector(extra: dict | None = None, **keys: Any):
    """Change the connector's configuration; a value of None removes the key."""

    def mutate(c):
        argv = c.plan.engine.argv
        config = json.loads(argv[argv.index("--kv-transfer-config") + 1].replace(": <port:lmcache-0>", ": 0"))
        config |= keys
        config["kv_connector_extra_config"] = {**config.get("kv_connector_extra_config", {}), **(extra or {})}
        config = {name: value for name, value in config.items() if value is not None}
        flag = ("--kv-transfer-config", json.dumps(config))
        return service("engine", drop=("--kv-transfer-config",), add=flag)(c)

    return mutate


def mooncake(**values: Any):
    def mutate(c):
        file = c.plan.files[-1]
        return fields(files=(file.model_copy(update={"text": json.dumps({**json.loads(file.text), **values})}),))(c)

    return mutate


LMCACHE = ("dsv4-b200-vllm", "lmcache")
SIMPLE = ("dsv4-b200-vllm", "vllm-simple")
NATIVE = ("dsv4-b200-vllm", "vllm-native")
MOONCAKE = ("dsv4-b200-vllm", "mooncake")
CONTROL = ("dsv4-b200-vllm", "none")
HICACHE = ("qwen3.5-h100-sglang", "hicache")
KIMI = ("kimik3-mi355x-vllm", "lmcache")
ROUTED = ("dsv4-b200-vllm", "none", True)
BROKEN = PathFacts(exists=True, shards_named=96, shards_missing=95, has_config=True)

CASES: dict[str, tuple[tuple, Any]] = {
    "plan_blocked": (CONTROL, fields(blocked_by=(Blocker(code="needs_container_patch", says="patch it"),))),
    "backend_version_open": (LMCACHE, fields(packages=("lmcache",))),
    "package_missing": (LMCACHE, node(packages={"lmcache": "0.9"})),
    "tool_parser_missing": (CONTROL, service("engine", drop=("--enable-auto-tool-choice",))),
    "hash_seed_missing": (LMCACHE, service("lmcache-0", env={"PYTHONHASHSEED": None})),
    "prefix_caching_off": (CONTROL, service("engine", add=("--no-enable-prefix-caching",))),
    "metrics_off": (HICACHE, service("engine", drop=("--enable-cache-report",))),
    "bound_to_all_interfaces": (CONTROL, service("engine", drop=("--host",), add=("--host", "0.0.0.0"))),
    "control_offloads": (CONTROL, service("engine", add=("--kv_offloading_backend", "native"))),
    "offload_without_switch": (SIMPLE, service("engine", drop=("--kv-transfer-config",))),
    "inherited_switch": (
        SIMPLE,
        lambda c: node(env={"VLLM_USE_SIMPLE_KV_OFFLOAD": "1"})(service("engine", unset=())(c)),
    ),
    "simple_switch_set": (NATIVE, service("engine", env={"VLLM_USE_SIMPLE_KV_OFFLOAD": "1"})),
    "budget_missing": (SIMPLE, row(total_cpu_dram_gb=0)),
    "tier_above_budget": (SIMPLE, fields(pinned_bytes=2399 * GIB)),
    "tier_below_half_budget": (SIMPLE, fields(pinned_bytes=2399 * GB // 8)),
    "tier_above_node": (SIMPLE, node(dram_total_bytes=2400 * GB)),
    "tier_above_available": (SIMPLE, node(dram_available_bytes=2000 * GB)),
    "tier_above_cgroup": (SIMPLE, node(cgroup_limit_bytes=2000 * GB)),
    "pinned_above_2_tb": (LMCACHE, fields(pinned_bytes=2100 * GB)),
    "tier_below_device": (SIMPLE, fields(pinned_bytes=100 * GB)),
    "tier_sized_by_ratio": (
        HICACHE,
        lambda c: fields(pinned_bytes=0)(service("engine", add=("--hicache-ratio", "2"))(c)),
    ),
    "two_sizes": (HICACHE, service("engine", add=("--hicache-ratio", "2"))),
    "memlock_limited": (SIMPLE, node(memlock_bytes=8 * GIB)),
    "pinned_pool_rounds_up": (NATIVE, lambda sound: replace(sound, layers=61)),
    "register_512_gib": (SIMPLE, fields(pinned_bytes=8 * 512 * GIB)),
    "shm_too_small": (NATIVE, node(shm_free_bytes=1512 * GIB)),
    "shm_below_lmcache": (LMCACHE, node(shm_free_bytes=1512 * GB)),
    "shm_leftovers": (CONTROL, node(shm_leftovers=("vllm_offload_17.mmap",))),
    "gpus_too_few": (CONTROL, node(gpus_visible=4)),
    "gpu_family": (CONTROL, node(gpu="h200")),
    "gpu_memory_in_use": (CONTROL, node(gpu_memory_used_share=0.55)),
    "driver_too_old": (HICACHE, node(driver_major=570)),
    "hip_devices_unset": (KIMI, node(env={"ROCR_VISIBLE_DEVICES": "0,1"})),
    "server_wide_key": (SIMPLE, connector({"cpu_bytes_to_use": 299875000000})),
    "string_boolean": (SIMPLE, connector({"lazy_offload": "false"})),
    "offloading_size_unit": (NATIVE, service("engine", add=("--kv_offloading_size", "2399"))),
    "load_failure_policy": (MOONCAKE, connector(kv_load_failure_policy=None)),
    "hybrid_manager_off": (KIMI, service("engine", add=("--disable-hybrid-kv-cache-manager",))),
    "connector_module_path": (LMCACHE, connector(kv_connector_module_path=None)),
    "connector_host_scheme": (LMCACHE, connector({"lmcache.mp.host": "127.0.0.1"})),
    "cumem_with_lmcache": (LMCACHE, service("engine", add=("--enable-cumem-allocator",))),
    "expandable_segments_with_lmcache": (
        LMCACHE,
        service("engine", env={"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
    ),
    "lease_below_message_timeout": (
        LMCACHE,
        service("lmcache-0", drop=("--l1-read-ttl-seconds",), add=("--l1-read-ttl-seconds", "3600")),
    ),
    "lease_below_request_timeout": (LMCACHE, service("lmcache-0", drop=("--l1-read-ttl-seconds",))),
    "chunk_not_multiple": (LMCACHE, fields(cache=CacheFacts(block_tokens=(1536,)))),
    "object_groups": (KIMI, service("lmcache-0", drop=("--separate-object-groups",))),
    "eviction_policy": (
        LMCACHE,
        service("lmcache-0", drop=("--eviction-policy",), add=("--eviction-policy", "IsolatedLRU")),
    ),
    "lmcache_total": (LMCACHE, service("lmcache-0", drop=("--l1-size-gb",), add=("--l1-size-gb", "2399"))),
    "mooncake_lease": (MOONCAKE, service("mooncake-master", drop=("--default_kv_lease_ttl",))),
    "mooncake_watermark": (MOONCAKE, service("mooncake-master", drop=("--eviction_high_watermark_ratio",))),
    "mooncake_segment_suffix": (MOONCAKE, mooncake(global_segment_size="299GB")),
    "rdma_down": (MOONCAKE, node(rdma_active=("mlx5_0",))),
    "router_missing": (ROUTED, fields(router=None)),
    "router_not_sticky": (ROUTED, service("router", drop=("--policy",), add=("--policy", "round_robin"))),
    "router_timeout": (
        ROUTED,
        service("router", drop=("--request-timeout-secs",), add=("--request-timeout-secs", "60")),
    ),
    "router_retries": (ROUTED, service("router", drop=("--disable-retries",))),
    "keep_alive_short": (HICACHE, service("engine", env={"SGLANG_TIMEOUT_KEEP_ALIVE": None})),
    "slots_below_concurrency": (CONTROL, service("engine", drop=("--max-num-seqs",), add=("--max-num-seqs", "4"))),
    "graphs_below_batch": (ROUTED, service("engine", drop=("--max-num-seqs",), add=("--max-num-seqs", "64"))),
    "context_parallel_uneven": (CONTROL, row(dcp_size=3)),
    "path_missing": (CONTROL, node(paths={"model": PathFacts(exists=False)})),
    "checkpoint_incomplete": (CONTROL, node(paths={"model": BROKEN})),
    "ports_taken": (LMCACHE, node(free_ports=2)),
    "open_files_low": (CONTROL, node(open_files=1024)),
    "cores_few": (CONTROL, node(cores=8)),
    "scratch_small": (("dsv4-b200-vllm", "vllm-tiering-fs"), node(scratch_free_bytes=1000 * GB)),
}


def start(arm: tuple) -> Case:
    key, backend, *dp = arm
    return case(key, backend, dp_attn=bool(dp))


# Rule -> the public report that it comes from.
REPORTED = {
    "lease_below_request_timeout": "X19",
    "cumem_with_lmcache": "X20",
    "hash_seed_missing": "X22",
    "shm_below_lmcache": "L14",
}


@pytest.mark.parametrize("code", RULES, ids=lambda code: f"{REPORTED[code]} {code}" if code in REPORTED else code)
def test_a_rule_finds_its_mistake_and_nothing_in_a_sound_arm(code):
    arm, mutate = CASES[code]
    sound = start(arm)
    assert code not in sound.codes()
    assert code in mutate(sound).codes()


@pytest.mark.parametrize(
    "arm",
    [LMCACHE, CONTROL, HICACHE, ROUTED, ("minimaxm3-mi355x-vllm", "lmcache"), ("minimaxm3-h100-vllm", "mooncake")],
)
def test_a_sound_arm_on_a_sound_node_has_no_finding(arm):
    assert start(arm).codes() == set()


@pytest.mark.parametrize("code", RULES)
def test_an_unknown_fact_makes_no_finding(code):
    arm, _ = CASES[code]
    sound = start(arm)
    assert code not in replace(sound, node=NodeFacts()).codes()


def test_tensors_at_a_power_of_two_take_what_was_asked_for():
    # Measured on one node of 126 GiB: 69 GB in 32 layers ended in the kernel's out-of-memory killer, 68 GB served.
    sound = start(NATIVE)
    found = {
        gb: check(
            sound.row.model_copy(update={"tp": 1, "gpus": 1}),
            sound.plan.model_copy(update={"pinned_bytes": gb * GB}),
            NodeFacts(dram_total_bytes=135_128_870_912),
            layers=32,
        )
        for gb in (68, 69)
    }
    assert "pinned_pool_rounds_up" not in {one.code for one in found[68]}
    assert "32 tensors of 2.01 GiB, each rounded up to a power of two: 128 GiB on a node of 126 GiB" in {
        one.says for one in found[69]
    }


def test_a_finding_says_what_was_found_and_what_to_do():
    sound = start(LMCACHE)
    [found] = check(sound.row, sound.plan, sound.node.model_copy(update={"shm_free_bytes": 100 * GIB}))
    assert str(found) == (
        "error shm_below_lmcache: L1 of 1,675 GiB, 90 % of /dev/shm is 90 GiB; "
        "enlarge /dev/shm, or set lmcache.shared_memory: false in the recipe"
    )


def test_declared_facts_come_from_runners_yaml():
    runners = yamlfile.validate(Runners, yamlfile.parse(RUNNERS, preflight.RECIPES), preflight.RECIPES)
    facts = declared_facts("cluster:b200-dgxc", runners)
    assert (facts.gpu, facts.gpus_visible) == ("b200", 8)
    assert facts.dram_total_bytes == 3_095_781 * 2**20
    assert declared_facts("cluster:b200-other", runners).gpus_visible is None


def test_the_whole_sweep_is_checked_without_a_gpu(shared, capsys):
    status = preflight.main(["--all", "--configs", str(shared / "inferencex" / "configs")])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 483
    assert status == 1
    errors = {code for line in lines[:-1] for code in line.split("\t")[2].split(", ") if code in RULES}
    assert {code for code in errors if RULES[code].severity == "error"} == {"plan_blocked"}


def test_a_rule_code_can_be_taken_once():
    with pytest.raises(ValueError, match="two rules have the code plan_blocked"):
        preflight.rule("plan_blocked", "error", "", "")(lambda _: None)


def test_the_committed_table_is_the_rules(project, capsys):
    assert preflight.main(["--table"]) == 0
    assert capsys.readouterr().out == (project / "docs" / "preflight.md").read_text()
    assert len(RULES) >= 40


def test_every_rule_has_a_case():
    assert CASES.keys() == RULES.keys()
