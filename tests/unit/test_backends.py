import json
import re

import pytest

from tests.archives import unpack
from tests.unit.arms import BUDGETS_GB, plan, planned
from workflow.backends import BACKENDS, combinations
from workflow.contract import InputError
from workflow.serving import GB, GIB, CacheFacts, Situation, flags_of

# Every combination on a row that it fits: (key, backend).
ARMS = [
    *(("dsv4-b200-vllm", name) for name in combinations()["vllm"]),
    *(("minimaxm3-mi355x-vllm", name) for name in combinations()["vllm"]),
    *(("kimik3-mi355x-vllm", name) for name in combinations()["vllm"]),
    *(("minimaxm3-h100-vllm", name) for name in combinations()["vllm"]),
    *(("qwen3.5-h100-sglang", name) for name in combinations()["sglang"]),
    *(("glm5.2-mi355x-sglang", name) for name in combinations()["sglang"]),
    *(("minimaxm3-b200-trt", name) for name in combinations()["trt"]),
    *(("kimik3-mi355x-atom", name) for name in combinations()["atom"]),
    *(("tiny", name) for name in combinations()["llamacpp"]),
]


@pytest.fixture(scope="module")
def h200_logs(shared, tmp_path_factory):
    """Return the logs of vLLM 0.25.1 with each connector on a real GPU."""
    folder = tmp_path_factory.mktemp("h200")
    unpack(shared / "artefacts" / "h200-vllm-0.25.1.tar.xz", folder, lambda name: name.endswith("/vllm.log"))
    return folder


def connector(found):
    text = flags_of(found.engine.argv)["--kv-transfer-config"][0]
    return json.loads(re.sub(r": <port:[a-z0-9-]+>", ": 0", text))


def server_flags(found, name="lmcache-0"):
    return flags_of(next(service for service in found.sidecars if service.name == name).argv)


@pytest.mark.parametrize(("key", "backend"), ARMS)
def test_no_arm_pins_more_than_its_budget_and_each_tier_uses_most_of_it(key, backend):
    found = plan(key, backend)
    usable = BUDGETS_GB[key] * GB - found.cache.host_reserve_gib * GIB
    if backend == "none":
        assert found.pinned_bytes == 0
    else:
        assert 0.6 * usable < found.pinned_bytes <= usable


@pytest.mark.parametrize(("key", "backend"), ARMS)
def test_every_arm_can_be_proven_and_every_proof_is_about_a_service_that_runs(key, backend):
    found = plan(key, backend)
    assert any(proof.expected for proof in found.proofs) or backend == "none"
    names = {service.name for service in found.services}
    assert {proof.service for proof in found.proofs} | {probe.service for probe in found.versions} <= names
    for proof in found.proofs:
        re.compile(proof.pattern)


def test_every_backend_is_reached_by_the_arms_above():
    assert {(planned(key).row.framework, backend) for key, backend in ARMS} == set(BACKENDS)


# Lines of real servers: vLLM 0.25.1 with each connector, Mooncake 0.3.14, SGLang's and LMCache's sources.
PREFIX = "(EngineCore pid=1507) INFO 12-01 02:15:25 "
B200 = "dsv4-b200-vllm"
SIMPLE = "SimpleCPUOffloadConnector: role=WORKER, "
RATE = "Prefix cache hit rate: 20.5%, External prefix cache hit rate: "
CREATING = "Creating v1 connector with name: "
SEGMENT = "(global_segment_size=295580032704, local_buffer_size=4294967296, preferred_segment=<none>"
POOL = "{'chunk_size': 256, 'max_local_cpu_size': 279.0, 'x"


@pytest.mark.parametrize(
    ("key", "backend", "name", "line"),
    [
        (B200, "vllm-simple", "tier-size-and-mode", f"{SIMPLE}per_rank=279.28 GB, world_size=8, mode=eager"),
        (B200, "vllm-native", "cpu-spec", "Creating offloading spec with name: CPUOffloadingSpec"),
        (
            B200,
            "vllm-tiering-fs",
            "second-tier",
            "Created TieringOffloadingManager with primary tier (lru, 768 blocks) and 1 secondary tier(s)",
        ),
        (B200, "mooncake", "segment-size", f"Mooncake mode=embedded {SEGMENT}"),
        (B200, "lmcache-v1", "pool-size", f"Creating LMCacheEngine with config: {POOL}"),
        (B200, "lmcache", "connector-created", f"{CREATING}LMCacheMPConnector and engine_id: a"),
        (B200, "lmcache", "tokens-restored", f"{RATE}38.9%"),
        ("qwen3.5-h100-sglang", "hicache", "host-pool", "Allocating 104.00 GB host memory for hierarchical KV cache."),
    ],
)
def test_a_real_line_proves_the_arm(key, backend, name, line):
    proof = next(proof for proof in plan(key, backend).proofs if proof.name == name)
    assert re.search(proof.pattern, PREFIX + line)


@pytest.mark.parametrize(
    ("backend", "name", "line"),
    [
        # The lazy mode is another system; an eighth of the budget is another arm; a tier that is never hit is no tier.
        ("vllm-simple", "tier-size-and-mode", f"{SIMPLE}per_rank=279.28 GB, world_size=8, mode=lazy"),
        ("vllm-simple", "tier-size-and-mode", f"{SIMPLE}per_rank=34.91 GB, world_size=8, mode=eager"),
        ("lmcache", "tokens-restored", f"{RATE}0.0%"),
        ("vllm-native", "connector-created", f"{CREATING}SimpleCPUOffloadConnector and"),
    ],
)
def test_a_line_of_another_arm_does_not(backend, name, line):
    proof = next(proof for proof in plan(B200, backend).proofs if proof.name == name)
    assert not re.search(proof.pattern, PREFIX + line)


@pytest.mark.parametrize(
    "backend", ["none", "vllm-simple", "vllm-native", "vllm-tiering-fs", "lmcache-mp", "lmcache-v1", "mooncake"]
)
def test_the_proofs_that_do_not_depend_on_the_size_hold_in_the_logs_of_a_real_server(h200_logs, backend):
    lines = (h200_logs / backend / "vllm.log").read_text(errors="replace").splitlines()
    sized = ("tier-size-and-mode", "segment-size", "pool-size")
    for proof in plan(B200, {"lmcache-mp": "lmcache"}.get(backend, backend)).proofs:
        if proof.service == "engine" and proof.name not in sized:
            assert any(re.search(proof.pattern, line) for line in lines) == proof.expected, proof.name


def test_simple_gets_bytes_per_rank_and_a_json_boolean():
    extra = connector(plan("dsv4-b200-vllm", "vllm-simple"))["kv_connector_extra_config"]
    assert extra["cpu_bytes_to_use_per_rank"] == 2399 * GB // 8
    assert extra["lazy_offload"] is False
    assert "cpu_bytes_to_use" not in extra


def test_native_gets_the_bytes_of_one_scheduler():
    size = connector(plan("dsv4-b200-vllm", "vllm-native"))["kv_connector_extra_config"]["cpu_bytes_to_use"]
    per_rank = connector(plan("dsv4-b200-vllm", "vllm-native", dp_attn=True))["kv_connector_extra_config"]
    assert size == 2399 * GB
    assert per_rank["cpu_bytes_to_use"] == 2399 * GB // 8


def test_one_lmcache_server_owns_the_pool_derated_on_blackwell_and_says_so():
    found = plan("dsv4-b200-vllm", "lmcache", "0.5.3")
    assert server_flags(found)["--l1-size-gb"] == (str(int(0.75 * 2399 * GB / GIB)),)
    assert "L1 is 75% of the host memory budget" in found.notes
    assert len(found.sidecars) == 1


def test_a_server_per_rank_shares_the_pool_and_the_connector_knows_all_of_them():
    found = plan("minimaxm3-mi355x-vllm", "lmcache", "0.5.3")
    assert [service.name for service in found.sidecars] == [f"lmcache-{i}" for i in range(4)]
    assert server_flags(found)["--l1-size-gb"] == (str(int(299 * GB / 4 / GIB)),)
    urls = connector(found)["kv_connector_extra_config"]["lmcache.mp.server_urls"].split(",")
    assert urls == [f"tcp://127.0.0.1:<port:lmcache-{i}>" for i in range(4)]


def test_a_hybrids_chunk_holds_every_groups_blocks_in_groups_of_their_own():
    flags = server_flags(plan("kimik3-mi355x-vllm", "lmcache"))
    assert flags["--chunk-size"] == ("3072",)
    assert "--separate-object-groups" in flags
    assert "--no-separate-object-groups" in server_flags(plan("dsv4-b200-vllm", "lmcache"))


def test_lmcaches_connector_is_its_own_module_reached_by_tcp_with_a_lease_above_the_timeout():
    found = plan("dsv4-b200-vllm", "lmcache")
    config = connector(found)
    assert config["kv_connector_module_path"] == "lmcache.integration.vllm.lmcache_mp_connector"
    assert config["kv_connector_extra_config"]["lmcache.mp.host"] == "tcp://127.0.0.1"
    assert config["kv_load_failure_policy"] == "recompute"
    assert (
        float(server_flags(found)["--l1-read-ttl-seconds"][0])
        >= config["kv_connector_extra_config"]["lmcache.mp.mq_timeout"]
    )


def test_lmcache_takes_the_allocators_out_that_it_cannot_map():
    found = plan("dsv4-b200-vllm", "lmcache", dp_attn=True)
    assert "--enable-cumem-allocator" not in found.engine.argv
    assert "PYTORCH_ALLOC_CONF" not in found.engine.env
    assert "PYTORCH_ALLOC_CONF" in found.engine.unset
    control = plan("dsv4-b200-vllm", dp_attn=True)
    assert "--enable-cumem-allocator" in control.engine.argv
    assert control.engine.env["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


def test_mooncake_states_bytes_a_lease_and_a_master_that_answers():
    found = plan("minimaxm3-h100-vllm", "mooncake", "0.3.11.post1")
    config = json.loads(found.files[0].text)
    reserve = (414 + 26 * 8) * GIB
    assert config["global_segment_size"] == (1731 * GB - reserve) // 8 - 4 * GIB
    assert config["local_buffer_size"] == 4 * GIB
    assert server_flags(found, "mooncake-master")["--default_kv_lease_ttl"] == ("60000",)
    assert found.sidecars[0].probe.path == "/metrics"
    assert found.engine.env["MOONCAKE_CONFIG_PATH"] == "<path:mooncake-config>"


def test_mooncakes_copies_are_tuned_by_options_and_not_by_variables_in_a_recipe():
    copies = {"cross_layer_blocks": True, "pinned": True, "model_runner": "v1"}
    tuned = {**copies, "tcp_io_threads": 8, "tcp_lanes": 16, "protocol": "tcp"}
    plain, found = (
        plan("minimaxm3-h100-vllm", "mooncake", "0.3.14", options=some) for some in ({}, {"mooncake": tuned})
    )
    segment = str(json.loads(found.files[0].text)["global_segment_size"])
    added = {name: value for name, value in found.engine.env.items() if name not in plain.engine.env}
    assert added == {
        "MC_STORE_PIN_MEMORY_MAX_BYTES": segment,
        "MC_NUM_TCP_IO_THREADS": "8",
        "MC_TCP_LANES_PER_PEER": "16",
        "MC_TCP_BIND_ADDRESS": "127.0.0.1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }
    assert '"enable_cross_layers_blocks": true' in " ".join(found.engine.argv)
    assert "enable_cross_layers_blocks" not in " ".join(plain.engine.argv)


def test_what_vllms_connector_alone_can_do_is_refused_below_hicache():
    with pytest.raises(InputError, match=r"backends.hicache-mooncake.pinned"):
        plan("qwen3.5-h100-sglang", "mooncake", "0.3.11.post1", options={"mooncake": {"pinned": True}})


def test_mooncake_on_amd_goes_over_tcp_and_does_not_claim_to_run():
    found = plan("minimaxm3-mi355x-vllm", "mooncake", "0.3.11.post1")
    assert json.loads(found.files[0].text)["protocol"] == "tcp"
    assert [blocker.code for blocker in found.blocked_by] == ["needs_source_build"]


def test_hicache_sizes_one_pool_so_that_all_pools_of_all_ranks_fit():
    size = int(flags_of(plan("qwen3.5-h100-sglang", "hicache").engine.argv)["--hicache-size"][0])
    assert size == 104  # 1731 GB / 8 ranks, less 1 GB, over two pools and a fifteenth
    assert size * 31 / 15 * 8 <= 1731


def test_hicaches_ratio_follows_the_budget_where_the_device_pool_is_known():
    found = plan("glm5.2-mi355x-sglang", "hicache")
    assert flags_of(found.engine.argv)["--hicache-ratio"] == ("1.24",)
    assert found.pinned_bytes == round(1.24 * 241.7 * GB * 4)


def test_hicache_with_mooncake_below_takes_both_levels_out_of_one_budget():
    found = plan("qwen3.5-h100-sglang", "mooncake", "0.3.11.post1")
    flags = flags_of(found.engine.argv)
    assert flags["--hicache-storage-backend"] == ("mooncake",)
    assert found.sidecars[0].name == "mooncake-master"
    assert found.pinned_bytes <= 1731 * GB
    assert int(flags["--hicache-size"][0]) == 83  # 40 GiB a rank less


def test_trt_gets_the_budget_per_rank_in_its_file_and_the_control_gets_zero():
    assert f"host_cache_size: {1199 * GB // 4}\n" in plan("minimaxm3-b200-trt", "native").files[0].text
    assert "host_cache_size: 0\n" in plan("minimaxm3-b200-trt").files[0].text


def test_atoms_library_gets_gib_per_rank_and_room_to_stage_a_state_entry():
    env = plan("kimik3-mi355x-atom", "lmcache", "0.4.5").engine.env
    assert env["LMCACHE_MAX_LOCAL_CPU_SIZE"] == str(257 * GB // 8 // GIB)
    assert env["OFFLOAD_GPU_STAGING_CHUNKS"] == "16"


def test_lmcache_in_process_refuses_linear_state():
    assert [blocker.code for blocker in plan("kimik3-mi355x-vllm", "lmcache-v1").blocked_by][-1] == "lmcache_v1_hybrid"


@pytest.mark.parametrize(("key", "backend"), ARMS)
def test_the_hash_seed_is_the_same_in_all_arms(key, backend):
    if planned(key).row.framework != "llamacpp":
        assert plan(key, backend).engine.env["PYTHONHASHSEED"] == "0"


@pytest.mark.parametrize(("name", "backend"), BACKENDS.items(), ids=str)
def test_an_arm_is_a_pure_function_of_its_situation(name, backend):
    key = next(key for key, arm in ARMS if (planned(key).row.framework, arm) == name)
    situation = Situation(row=planned(key, name[1]).row, cache=CacheFacts(block_tokens=(16,)), options={})
    assert backend.arm(situation) == backend.arm(situation)


@pytest.mark.parametrize(
    ("backend", "posts", "folders"),
    [
        ("none", [], ()),
        ("vllm-native", [], ()),
        ("vllm-simple", [], ()),
        ("mooncake", [], ()),
        ("lmcache", [("lmcache-0-http", "/cache/clear")], ()),
        ("vllm-tiering-fs", [], ("kv-tier",)),
    ],
)
def test_a_vllm_arm_says_how_it_is_emptied_and_is_told_so_only_where_servers_are_shared(backend, posts, folders):
    found = plan("minimaxm3-h100-vllm", backend)
    assert found.empties.posts == (*posts, ("engine", "/reset_prefix_cache?reset_external=true"))
    assert found.empties.folders == folders
    assert set(folders) <= set(found.scratch)
    assert "VLLM_SERVER_DEV_MODE" not in found.engine.env
    assert found.shareable().engine.env == {**found.engine.env, "VLLM_SERVER_DEV_MODE": "1"}


def test_what_a_server_beside_the_engine_counts_is_scraped_too():
    ports = {name: [port for port, _ in plan("minimaxm3-h100-vllm", name).metrics] for name in ("lmcache", "mooncake")}
    assert ports == {"lmcache": ["engine", "lmcache-0-http"], "mooncake": ["engine", "mooncake-metrics"]}


def test_no_emptying_is_claimed_where_it_would_not_reach_everything():
    assert plan("dsv4-b200-vllm", dp_attn=True).empties is None, "the proof's prompts reach one rank of several"
    assert plan("minimaxm3-h100-vllm", "lmcache-v1").empties is None
    assert plan("minimaxm3-h100-vllm", "vllm-simple", options={"vllm-simple": {"lazy": True}}).empties is None
    assert plan("qwen3.5-h100-sglang", "hicache").empties is None
