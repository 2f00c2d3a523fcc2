import json
import re
import shlex
import subprocess

import pytest

from tests.unit.arms import plan, planned, recipes
from workflow import plans
from workflow.backends import BACKENDS, combinations, vllm_simple
from workflow.contract import InputError, digest
from workflow.engines.launching import released_version
from workflow.matrix import Component, PlannedRow
from workflow.plans import as_shell, differences, load_inferencex, plan_for, single_node_rows
from workflow.serving import flags_of, ports_of

ARMS = combinations()["vllm"]


@pytest.fixture(scope="module")
def every_point(shared):
    """Return all single-node agentic rows of InferenceX's files."""
    return single_node_rows(*load_inferencex(shared / "inferencex" / "configs"))


def test_every_single_node_agentic_point_has_a_plan(shared, capsys):
    status = plans.main(["--all", "--configs", str(shared / "inferencex" / "configs")])
    lines = capsys.readouterr().out.splitlines()
    assert status == 0
    assert lines[-1] == "482 points: 463 ok, 19 blocked, 0 no plan"
    assert len(lines) == 483
    blocked = [line for line in lines[:-1] if not line.endswith("\tok")]
    assert {line.split("_")[0] for line in blocked} == {"kimik3", "qwen3.5"}
    assert {line.split("\t")[2] for line in blocked} == {"needs_container_patch"}


def test_a_point_without_a_plan_is_a_line_and_exit_status_1(shared, tmp_path, capsys):
    (tmp_path / "one.yaml").write_text((plans.RECIPES / "dsv4-b200-vllm.yaml").read_text())
    status = plans.main(["--all", "--configs", str(shared / "inferencex" / "configs"), "--recipes", str(tmp_path)])
    last = capsys.readouterr().out.splitlines()[-1]
    assert (status, last) == (1, "482 points: 10 ok, 0 blocked, 472 no plan")


def test_a_changed_flag_of_one_backend_changes_the_plans_of_that_backend_and_no_others(every_point, monkeypatch):
    def plans_now():
        return {
            (row.config_key, row.origin): digest(plan_for(row, recipes())[0].model_dump(mode="json"))
            for row in every_point
        }

    before = plans_now()
    original = vllm_simple.VllmSimple.arm
    monkeypatch.setattr(
        vllm_simple.VllmSimple,
        "arm",
        lambda self, situation: original(self, situation).model_copy(update={"argv": ("--kv-transfer-config", "{}")}),
    )
    after = plans_now()
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {
        (row.config_key, row.origin) for row in every_point if plans.backend_name(row.row) == "vllm-simple"
    }
    assert len(changed) == 30


def test_two_plans_of_one_row_are_equal():
    assert plan("dsv4-b200-vllm", "lmcache", "0.5.3") == plan("dsv4-b200-vllm", "lmcache", "0.5.3")


@pytest.mark.parametrize(("key", "backend"), [("dsv4-b200-vllm", "hicache"), ("tiny", "lmcache"), ("tiny", "lmcahe")])
def test_a_backend_that_an_engine_does_not_have_is_an_error_that_lists_all_combinations(key, backend):
    with pytest.raises(InputError) as caught:
        plan(key, backend)
    for engine, names in combinations().items():
        assert f"{engine}: {', '.join(names)}" in str(caught.value)
    assert "kv-offload-backend.name" in str(caught.value)


def test_an_unknown_router_is_an_error():
    row = planned("dsv4-b200-vllm", dp_attn=True)
    other = row.row.model_copy(update={"router": Component(name="nginx", version="1")})
    with pytest.raises(InputError, match=r"unknown router 'nginx'.*allowed: sglang-router, vllm-router"):
        plan_for(PlannedRow(other, row.config_key, row.file, row.line, row.entry), recipes())


@pytest.mark.parametrize("backend", [name for name in ARMS if name != "none"])
def test_a_recipe_that_carries_a_backends_flag_is_an_error(backend):
    path, recipe = next(item for item in recipes() if item[1].recipe == "dsv4-b200-vllm")
    greedy = recipe.model_copy(update={"argv": (*recipe.argv, "--kv-transfer-config={}")})
    with pytest.raises(InputError, match="--kv-transfer-config belongs to backend"):
        plan_for(planned("dsv4-b200-vllm", backend), ((path, greedy),))


def test_a_declared_version_is_pinned_and_read_back_from_every_process_that_uses_it():
    found = plan("dsv4-b200-vllm", "lmcache", "0.5.3")
    assert found.packages == ("lmcache==0.5.3",)
    declared = {(probe.component, probe.service): probe.declared for probe in found.versions}
    assert declared == {("vllm", "engine"): "0.27.1", ("lmcache", "lmcache-0"): "0.5.3", ("lmcache", "engine"): "0.5.3"}
    for probe in found.versions:
        assert re.search(probe.pattern, f"version of {probe.component} is 9.9").group("version") == "9.9"
        service = next(service for service in found.services if service.name == probe.service)
        assert probe.component in service.argv[: service.argv.index("--")]


@pytest.mark.parametrize("key", ["dsv4-b200-vllm", "qwen3.5-h100-sglang", "minimaxm3-b200-trt", "kimik3-mi355x-atom"])
@pytest.mark.parametrize("version", [None, "1.2.3"])
def test_every_version_that_a_row_declares_has_a_probe(key, version):
    framework = planned(key).row.framework
    for name in combinations()[framework]:
        found = plan(key, name, version)
        pinned = [item.partition("==")[2] for item in found.packages]
        assert all(item == (version or "") for item in pinned)
        if pinned and version:
            assert version in [probe.declared for probe in found.versions]


@pytest.mark.parametrize(
    ("image", "version"),
    [
        ("vllm/vllm-openai:v0.27.1", "0.27.1"),
        ("lmsysorg/sglang:v0.5.16-cu130", "0.5.16"),
        ("nvcr.io/nvidia/tensorrt-llm/release:1.3.0rc23.post1", "1.3.0rc23.post1"),
        ("vllm/vllm-openai:nightly-dev-x86_64-cu13.0.1-426e59f", None),
        ("lmsysorg/sglang-rocm:v0.5.16-rocm720-mi35x-20260728", None),
    ],
)
def test_only_a_release_image_promises_a_version(image, version):
    assert released_version(image) == version


@pytest.mark.parametrize(
    ("key", "header"), [("dsv4-b200-vllm", "X-Session-ID"), ("dsv4-b300-sglang", "X-SMG-Routing-Key")]
)
def test_dp_attention_gets_a_sticky_router_on_a_port_of_its_own(key, header):
    found = plan(key, dp_attn=True)
    assert found.api_port == "router"
    assert found.session_header == header
    assert found.metrics == (("engine", "/metrics"),)
    assert {"engine", "router", "router-metrics"} <= set(ports_of(found))
    assert any(name.endswith("FROM_CORRELATION_ID") for name in found.client_env)


def test_without_dp_attention_there_is_no_router():
    assert plan("dsv4-b200-vllm").router is None


def test_under_dp_attention_slots_and_graphs_are_per_rank_and_graphs_count_tokens():
    flags = flags_of(plan("dsv4-b200-vllm", dp_attn=True).engine.argv)
    assert flags["--max-num-seqs"] == ("8",)  # 2 * 32 sessions over 8 ranks
    assert json.loads(flags["--compilation-config"][0])["cudagraph_capture_sizes"] == list(range(4, 33, 4))
    assert flags["--tensor-parallel-size"] == ("1",)
    assert flags["--data-parallel-size"] == ("8",)


def test_trt_has_a_batch_list_for_every_concurrency():
    text = plan("minimaxm3-b200-trt").files[0].text
    assert "- 35\n" in text
    assert "max_batch_size: 35\n" in text


def test_arms_differ_only_in_what_a_backend_declares():
    control = plan("dsv4-b200-vllm")
    found = {str(item).split(" {")[0] for item in differences(control, plan("dsv4-b200-vllm", "vllm-simple"))}
    assert found == {
        "+ engine argv: --kv-transfer-config",
        "~ host memory: pinned 0 bytes -> 2399000000000 bytes",
        "+ notes: stores are eager",
    }
    assert differences(control, control) == ()


def test_what_an_arm_forces_on_the_recipe_is_a_printed_difference():
    found = [str(item) for item in differences(plan("dsv4-b200-vllm"), plan("dsv4-b200-vllm", "lmcache"))]
    assert "- engine argv: --enable-cumem-allocator" in found
    assert "~ engine argv: --gpu-memory-utilization 0.90 -> 0.88" in found
    assert "+ notes: L1 is 75% of the host memory budget" in found


def test_equalized_arms_share_what_one_of_them_forces():
    peers = ("none", "lmcache", "vllm-simple")
    arms = {name: plan_for(planned("dsv4-b200-vllm", name), recipes(), peers)[0] for name in peers}
    for found in arms.values():
        assert "--enable-cumem-allocator" not in found.engine.argv
        assert flags_of(found.engine.argv)["--gpu-memory-utilization"] == ("0.88",)
    flags = {name: flags_of(found.engine.argv) for name, found in arms.items()}
    changed = {flag for flag in flags["lmcache"] if flags["none"].get(flag) != flags["lmcache"][flag]} - {""}
    assert changed == {"--kv-transfer-config"}


@pytest.mark.parametrize("key", ["dsv4-b200-vllm", "kimik3-mi355x-vllm"])
@pytest.mark.parametrize("backend", ARMS)
def test_the_printed_shell_is_shell_and_holds_the_very_words_of_the_plan(key, backend):
    found = plan(key, backend, "1.0")
    text = as_shell(found)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=30)
    assert not re.search(r"<(port|path):", text)
    words = shlex.split(text, comments=True)
    for value in ("--kv-cache-dtype", "fp8", found.served_model_name):
        assert value in words


def test_a_point_file_is_printed_and_compared(tmp_path, capsys):
    for name in ("none", "vllm-simple"):
        point = {"plan": plan("dsv4-b200-vllm", name).model_dump(mode="json")}
        (tmp_path / f"{name}.json").write_text(json.dumps(point))
    assert plans.main([str(tmp_path / "none.json")]) == 0
    assert "vllm serve models/deepseek-ai/DeepSeek-V4-Pro" in capsys.readouterr().out
    assert plans.main([str(tmp_path / "none.json"), "--against", str(tmp_path / "vllm-simple.json")]) == 0
    assert "+ engine argv: --kv-transfer-config" in capsys.readouterr().out


def test_a_file_that_is_no_point_is_one_line_and_status_2(tmp_path, capsys):
    (tmp_path / "x.json").write_text("{}")
    assert plans.main([str(tmp_path / "x.json")]) == 2
    assert "not a point file" in capsys.readouterr().err


def test_the_document_shows_the_plans_as_they_are(project, capsys):
    assert plans.main(["--document"]) == 0
    assert capsys.readouterr().out == (project / "docs" / "serve-plans.md").read_text()


def test_the_registry_names_no_combination_twice_under_one_plug_in():
    assert len(BACKENDS) == len({(engine, backend.name) for (engine, _), backend in BACKENDS.items()})


def test_the_guide_lists_the_combinations_that_exist(project):
    text = (project / "docs" / "add-a-backend.md").read_text()
    for engine, names in combinations().items():
        assert f"| {engine} | {', '.join(names)} |\n" in text
