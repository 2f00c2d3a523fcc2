"""The demo with real tiers and no GPU plans as its page says. Running it takes minutes and gigabytes: no test does."""

import pytest

from workflow.config import load_config
from workflow.contract import InputError
from workflow.plans import differences
from workflow.recipes import load_recipes
from workflow.serving import flags_of
from workflow.sweep import plan_sweep

CONFIG = "configs/demo-vllm/config.yaml"


@pytest.fixture
def arms(project, monkeypatch):
    monkeypatch.chdir(project)
    sweep = plan_sweep(load_config([project / CONFIG], {}))
    assert not sweep.doomed
    assert not sweep.findings
    return {point.arm: point for point in sweep.points.values()}


def test_three_arms_of_one_group(arms):
    assert set(arms) == {"none", "lmcache", "mooncake"}
    assert len({point.group for point in arms.values()}) == 1
    assert {point.concurrency for point in arms.values()} == {6}


def test_every_service_of_an_arm_runs_in_the_arms_environment(arms):
    wanted = {"none": "vllm-cpu", "lmcache": "vllm-cpu-lmcache", "mooncake": "vllm-cpu-mooncake"}
    for arm, environment in wanted.items():
        assert {service.environment for service in arms[arm].plan.services} == {environment}
        assert arms[arm].environments.keys() == {"aiperf", environment}


def test_environments_of_the_arms_differ_by_their_backends_packages_only(project):
    """Another torch or transformers in one arm would be measured as if the backend had made the difference."""

    def pins(name):
        lines = (project / f"configs/environments/{name}.txt").read_text().splitlines()
        return dict(line.split("==", 1) for line in lines if "==" in line and not line.startswith("#"))

    control = pins("vllm-cpu")
    for backend, own in {"lmcache": "lmcache", "mooncake": "mooncake-transfer-engine-non-cuda"}.items():
        arm = pins(f"vllm-cpu-{backend}")
        assert control.items() <= arm.items()
        assert own in arm.keys() - control.keys()


def test_without_a_gpu_the_tiers_use_what_a_cpu_has(arms):
    server = flags_of(arms["lmcache"].plan.sidecars[0].argv)
    assert server["--supported-transfer-mode"] == ("auto",)
    mooncake = arms["mooncake"].plan
    assert mooncake.packages == ("mooncake-transfer-engine-non-cuda==0.3.13.post1",)
    assert '"protocol": "tcp"' in mooncake.files[0].text
    assert "WITH_NVIDIA_PEERMEM" not in mooncake.engine.env


def test_what_the_arms_change_in_the_engines_command_is_the_connector(arms):
    for arm in ("lmcache", "mooncake"):
        found = differences(arms["none"].plan, arms[arm].plan)
        argv = {one.name for one in found if one.where == "engine argv"} - {"command"}
        # `--` ends the names whose versions are printed first; the backend's is one more of them.
        assert argv - {"--"} == {"--kv-transfer-config"}


def test_an_environment_without_a_lock_is_named_with_the_recipe(project, monkeypatch, tmp_path):
    monkeypatch.chdir(project)
    recipe = project / "configs/demo-vllm/recipes/tiny-vllm-cpu.yaml"
    (tmp_path / recipe.name).write_text(recipe.read_text().replace("none: vllm-cpu", "none: vllm-gpu"))
    assert load_recipes(tmp_path)[0][1].environments["none"] == "vllm-gpu"
    with pytest.raises(InputError, match=r"recipe tiny-vllm-cpu: no lock file vllm-gpu\.txt.*vllm-cpu,"):
        plan_sweep(load_config([project / CONFIG], {"recipes": str(tmp_path)}))
