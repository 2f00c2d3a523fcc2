"""Locks: what they pin, which environment stands for an image, how one is resolved for a node."""

import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import packages_distributions

import pytest

from tests.unit.test_bundle import write_wheel
from workflow.bundle import Node
from workflow.config import Cluster, load_config
from workflow.contract import InputError
from workflow.environments import (
    Environment,
    environment_key,
    environment_with,
    normalised,
    pins,
    prepare,
    wheel_folders,
)
from workflow.nodelock import overrides
from workflow.plans import differences
from workflow.sweep import plan_sweep

NODE = Node(python="3.12.3", glibc="2.39", packages={"torch": "2.11.0", "pandas": "3.0.6", "Jinja2": "3.1.6"})


@pytest.fixture
def locks(tmp_path):
    texts = {
        "old": "vllm==0.25.1\nlmcache==0.5.2\n",
        "new": "vllm==0.25.1\nLMCache==0.5.6 ; python_version > '3'\n",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_text(text)
    return {tmp_path / f"{name}.txt": pins(tmp_path / f"{name}.txt") for name in texts}


def test_the_first_environment_that_pins_what_is_declared_is_used(locks):
    assert environment_with(("vllm==0.25.1",), locks, "a line") == "old"
    assert environment_with(("vllm==0.25.1", "lmcache==0.5.6"), locks, "a line") == "new"
    assert environment_with(("vllm", "lmcache"), locks, "a line") == "old"


def test_a_version_that_no_environment_pins_is_refused_with_what_each_lacks(locks):
    with pytest.raises(InputError) as error:
        environment_with(("vllm==0.25.1", "lmcache==0.5.5"), locks, "master.yaml:7")
    assert "master.yaml:7" in str(error.value)
    assert str(error.value).count("lacks lmcache==0.5.5") == 2
    assert [have["lmcache"] for have in locks.values()] == ["0.5.2", "0.5.6"]


def test_environments_are_for_nodes_without_containers():
    with pytest.raises(ValueError, match="environments go with launcher bare; with pyxis the packages are the image's"):
        Cluster(launcher="pyxis", environments=("vllm",))


# ------------------------------------------------------------------------------------------------ docs/examples/h200
@pytest.fixture
def h200(project, monkeypatch):
    monkeypatch.chdir(project)
    return plan_sweep(load_config([project / "docs/examples/h200/configs/config.yaml"], {}))


ARMS = {
    *("none", "vllm-native", "vllm-simple", "vllm-tiering-fs", "mooncake"),
    *("lmcache-0.5.2", "lmcache-0.5.2+stored.once"),
}


def test_the_h200_example_plans_every_arm_at_three_concurrencies(h200):
    cells = {(point.arm, point.concurrency) for point in h200.points.values()}
    assert cells == {(arm, concurrency) for arm in ARMS for concurrency in (4, 8, 16)}
    assert len({point.group for point in h200.points.values()}) == 1
    assert not h200.doomed, h200.preflight
    assert {point.row.total_cpu_dram_gb for point in h200.points.values()} == {0, 68}, "one budget for all tiers"


def test_the_check_of_kv_blocks_asks_every_arm_with_weights_that_mind_the_prompt(project, monkeypatch):
    monkeypatch.chdir(project)
    configs = project / "docs/examples/h200/configs"
    check = plan_sweep(load_config([configs / "config.yaml", configs / "kv-check.yaml"], {}))
    assert sorted(point.arm for point in check.points.values()) == sorted(ARMS)
    assert not check.doomed, check.preflight
    for point in check.points.values():
        assert point.made_model is not None
        assert "weights_std" in point.made_model
        assert "dummy" not in point.plan.engine.argv, "vLLM's own weights answer all prompts alike"
        assert point.row.total_cpu_dram_gb in (0, 17)


def test_what_measures_on_a_node_imports_nothing_that_the_nodes_lock_does_not_pin(project):
    code = (
        "import sys; known = set(sys.modules); import workflow.runs, workflow.turns; print(*set(sys.modules) - known)"
    )
    command = [sys.executable, "-c", code]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=project).stdout
    modules = {name.partition(".")[0] for name in printed.split()}
    distributions = packages_distributions()
    imported = {normalised(one) for module in modules for one in distributions.get(module, ())}
    assert "pydantic" in imported
    assert imported <= pins(project / "docs/examples/h200/configs/environments/workflow.txt").keys()


def test_each_arm_of_the_h200_example_runs_where_its_versions_are_pinned(h200):
    for point in h200.points.values():
        environments = {service.environment for service in point.plan.services}
        new = point.arm == "lmcache-0.5.2+stored.once"
        assert environments == {"vllm-0.25.1-lmcache-stored-once" if new else "vllm-0.25.1"}
        assert environments | {"aiperf"} == point.environments.keys()
        assert [probe.declared for probe in point.plan.versions if probe.component == "vllm"] == ["0.25.1"]


def test_M8_a_patched_backend_is_an_arm_of_its_own_and_the_environment_is_a_printed_difference(h200, project):
    by_arm = {point.arm: point for point in h200.points.values() if point.concurrency == 8}
    old, new = by_arm["lmcache-0.5.2"], by_arm["lmcache-0.5.2+stored.once"]
    assert old.curve != new.curve, "pooled as repeats, their mean would be of neither"
    declared = [{probe.declared for probe in one.plan.versions if probe.component == "lmcache"} for one in (old, new)]
    assert declared == [{"0.5.2"}, {"0.5.2+stored.once"}], "what serves is compared with the label as well"
    assert (project / "docs/examples/h200/configs/environments/lmcache-0.5.2-stored-once.patch").is_file()
    found = [str(one) for one in differences(old.plan, new.plan)]
    assert "+ engine environment: vllm-0.25.1-lmcache-stored-once" in found
    assert not [one for one in found if one.startswith(("~ engine argv", "+ engine argv"))]


def test_a_second_version_does_not_buy_the_first_again(project, h200, tmp_path, monkeypatch):
    shutil.copytree(project / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("images"))
    monkeypatch.chdir(tmp_path)
    master = tmp_path / "docs/examples/h200/configs/master.yaml"
    lines = [line for line in master.read_text().splitlines() if "stored.once" not in line]
    master.write_text("\n".join(lines) + "\n")
    alone = plan_sweep(load_config([tmp_path / "docs/examples/h200/configs/config.yaml"], {}))
    assert {point.arm for point in alone.points.values()} >= {"lmcache", "none"}
    assert set(alone.points) < set(h200.points)


def test_a_cluster_that_names_an_environment_without_a_lock_is_refused(project, tmp_path, monkeypatch):
    shutil.copytree(project / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("images"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs/examples/h200/configs/environments/vllm-0.25.1.txt").unlink()
    with pytest.raises(InputError, match=r"clusters.yaml: clusters.cluster:h200-single.environments: no lock of env"):
        plan_sweep(load_config([tmp_path / "docs/examples/h200/configs/config.yaml"], {}))


# ---------------------------------------------------------------------------------------------- wheels of one's own
def test_a_lock_may_name_folders_of_wheels_beside_it(tmp_path):
    lock = tmp_path / "engine.txt"
    lock.write_text("# python: ==3.12.*\n--find-links wheels\nlmcache==0.5.2+stored.once\n")
    assert pins(lock) == {"lmcache": "0.5.2+stored.once"}
    assert wheel_folders(lock) == [tmp_path / "wheels"]
    lock.write_text("--index-url elsewhere\nlmcache==0.5.2\n")
    with pytest.raises(InputError, match=r"engine.txt:1: found '--index-url elsewhere'; allowed: name==version"):
        pins(lock)


def test_a_wheel_that_no_index_has_is_installed_from_the_folder_that_the_lock_names(tmp_path, monkeypatch):
    monkeypatch.setenv("UV_OFFLINE", "1")
    (tmp_path / "wheels").mkdir()
    write_wheel(tmp_path / "wheels", "greeting", "1.2+fixed", {})
    lock = tmp_path / "own.txt"
    lock.write_text("# python: >=3.11\n--find-links wheels\ngreeting==1.2+fixed\n")
    assert prepare(lock, tmp_path / "made").packages == {"greeting": "1.2+fixed"}


# ------------------------------------------------------------------------------------------------ locks for a node
def test_what_the_node_has_is_given_to_the_resolver(tmp_path):
    wanted = tmp_path / "client.in"
    wanted.write_text("# The client.\n# own: pandas\n# without: flashinfer_python, tilelang\naiperf==0.13.0\n")
    assert overrides(wanted, NODE) == [
        "jinja2==3.1.6",
        "torch==2.11.0",
        "flashinfer-python ; python_version < '0'",
        "tilelang ; python_version < '0'",
    ]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("# wihtout: tilelang", r"client.in:1: found 'wihtout'; allowed: without, own"),
        ("# own: polars", r"client.in: own: the node has no polars; take it out"),
    ],
)
def test_a_directive_that_does_nothing_is_refused(tmp_path, line, says):
    wanted = tmp_path / "client.in"
    wanted.write_text(f"{line}\naiperf==0.13.0\n")
    with pytest.raises(InputError, match=says):
        overrides(wanted, NODE)


def test_the_locks_of_the_h200_example_hold_what_their_sources_ask_for(project):
    for source in sorted((project / "docs/examples/h200/configs/environments").glob("*.in")):
        asked = [line for line in source.read_text().splitlines() if line and not line.startswith(("#", "--"))]
        have = pins(source.with_suffix(".txt"))
        for line in asked:
            name, _, version = line.partition("==")
            assert version in ("", have[name]), source


# ------------------------------------------------------------------------------------------------ what is installed
HEADER = "# python: >=3.11\n"


def wheel(folder, name, requires=(), script=False):
    """Write a wheel with nothing in it but its name, what it asks for, and perhaps a program of its name."""
    info = f"{name}-1.0.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
    metadata += "".join(f"Requires-Dist: {other}\n" for other in requires)
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        if script:
            archive.writestr(f"{name}.py", "def main():\n    print('served')\n")
            archive.writestr(f"{info}/entry_points.txt", f"[console_scripts]\n{name} = {name}:main\n")
        archive.writestr(f"{info}/RECORD", "")


def test_what_a_lock_leaves_out_does_not_come_back_and_what_lies_beside_it_is_found(tmp_path, monkeypatch):
    locks = tmp_path / "locks"
    locks.mkdir()
    wheel(locks, "engine", requires=["breaks-the-engine"])
    (locks / "engine.txt").write_text(HEADER + "./engine-1.0-py3-none-any.whl\n")
    monkeypatch.chdir(tmp_path)
    folder = (tmp_path / "environment").relative_to(tmp_path)
    made = prepare((locks / "engine.txt").relative_to(tmp_path), folder)
    assert made.packages == {"engine": "1.0"}
    assert Environment.read(folder / "environment.json") == made


def test_programs_of_an_environment_made_through_a_link_outlive_the_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    lock = tmp_path / "engine.txt"
    wheel(tmp_path, "engine", script=True)
    lock.write_text(HEADER + "./engine-1.0-py3-none-any.whl\n")
    prepare(lock, tmp_path / "link/environment")
    (tmp_path / "link").unlink()
    done = subprocess.run([tmp_path / "real/environment/bin/engine"], capture_output=True, text=True, check=True)
    assert done.stdout == "served\n"


def test_a_failed_installation_is_one_message_and_no_environment(tmp_path):
    lock = tmp_path / "engine.txt"
    lock.write_text(HEADER + "./gone-1.0-py3-none-any.whl\n")
    with pytest.raises(InputError, match=r"(?s)engine\.txt: `.*pip sync.*` failed:.*gone-1\.0"):
        prepare(lock, tmp_path / "environment")
    assert not (tmp_path / "environment/environment.json").exists()


def test_comments_are_not_in_the_key_and_packages_are(tmp_path):
    lock = tmp_path / "engine.txt"
    keys = []
    for text in ("a==1\n", "# why\na==1  # pinned\n", "a==2\n"):
        lock.write_text(HEADER + text)
        keys.append(environment_key(lock))
    assert keys[0] == keys[1] != keys[2]
