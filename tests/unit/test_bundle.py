"""A bundle is made on a machine with a network and installed on one without: parts, wheels, environments, refusals."""

import importlib.util
import json
import platform
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from workflow import bundle as bundles
from workflow import unbundle as installer
from workflow import yamlfile
from workflow.bundle import Bundle, Content, Node, compress, cut, download, make, repack, split_lock
from workflow.config import load_config
from workflow.contract import InputError, file_sha256
from workflow.environments import Environment
from workflow.points import Point
from workflow.replay import CORPUS
from workflow.sweep import plan_sweep
from workflow.traces import TraceManifest
from workflow.unbundle import Joined, Refused, check_node, main, read_manifest, unbundle

PYDANTIC = ("pydantic", "pydantic-core", "annotated-types", "typing-extensions", "typing-inspection")
HERE = {name: version(name) for name in (*PYDANTIC, "psutil")}


def write_wheel(folder, name, number, files):
    """Write a wheel of pure Python with one console script, as pip would build it."""
    module = name.replace("-", "_")
    info = f"{module}-{number}.dist-info"
    content = {
        f"{module}/__init__.py": f"def main():\n    print('{name} {number}')\n",
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{name} = {module}:main\n",
    }
    record = "".join(f"{path},,\n" for path in content) + f"{info}/RECORD,,\n"
    path = folder / f"{module}-{number}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for place, text in {**content, f"{info}/RECORD": record}.items():
            wheel.writestr(place, text)
    return path


def node(**change):
    fields = {"python": platform.python_version(), "glibc": "2.39", "packages": HERE}
    return Node.model_validate({**fields, **change})


@pytest.fixture
def checkout(project, tmp_path, monkeypatch):
    """A checkout that plans the demo, with locks of two packages, and their wheels downloaded already."""
    made = tmp_path / "checkout"
    shutil.copytree(project / "configs", made / "configs")
    downloads = made / ".bundle" / "work" / "downloads"
    downloads.mkdir(parents=True)
    corpus = " ".join(f"word{number % 977} shall be spoken" for number in range(20_000))
    for name, number, files in (
        ("aiperf", "0.13.0", {CORPUS: corpus, "aiperf/large/tables.txt": "never read"}),
        ("xllamacpp", "1.0", {}),
        ("runner", "2.0", {}),
    ):
        write_wheel(downloads, name, number, files)
        lock = {"aiperf": "aiperf", "xllamacpp": "llamacpp", "runner": "workflow"}[name]
        text = f"# python: >=3.11\n{name}=={number}\n" + "".join(f"{one}=={HERE[one]}\n" for one in PYDANTIC)
        (made / f"configs/environments/{lock}.txt").write_text(text)
    monkeypatch.chdir(made)
    return made


def bundle_of(checkout, part_bytes=20_000, **change):
    sweep = plan_sweep(load_config([checkout / "configs/config.yaml"], {}))
    out = checkout / ".bundle"
    return make(sweep, "llamacpp", node(**change), out, part_bytes, say=lambda _text: None)


# ------------------------------------------------------------------------------------------------ what is carried
def test_a_wheel_that_no_index_has_is_carried_from_the_folder_that_the_lock_names(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    own = tmp_path / "wheels"
    own.mkdir()
    write_wheel(own, "greeting", "1.2+fixed", {})
    found = download({"greeting": "1.2+fixed"}, node(), tmp_path / "downloads", [own])
    assert [wheel.name for wheel in found.values()] == ["greeting-1.2+fixed-py3-none-any.whl"]
    with pytest.raises(InputError, match=r"pip cannot download 1 wheels"):
        download({"greeting": "1.2+other"}, node(), tmp_path / "downloads", [own])


def test_what_the_node_has_in_this_very_version_is_left_to_it(tmp_path):
    lock = tmp_path / "engine.txt"
    lock.write_text(
        "torch==2.11.0\nnumpy==2.5.2\npandas==2.3.3  # the node's is too new\nPyYAML==6.0.3\nvllm==0.25.1\n"
    )
    have = {"torch": "2.11.0", "numpy": "2.5.2", "pandas": "3.0.6", "pyyaml": "6.0.3", "jax": "0.11.2"}
    carried, left = split_lock(lock, node(packages=have))
    assert carried == {"pandas": "2.3.3", "vllm": "0.25.1"}
    assert left == {"torch": "2.11.0", "numpy": "2.5.2", "pyyaml": "6.0.3"}


def test_a_line_that_pins_nothing_is_refused_with_its_number(tmp_path):
    lock = tmp_path / "engine.txt"
    lock.write_text("torch==2.11.0\nnumpy>=2\n")
    with pytest.raises(InputError, match=r"engine.txt:2: found 'numpy>=2'; allowed: name==version"):
        split_lock(lock, node())


def test_an_engine_without_points_and_a_missing_lock_are_refused(checkout):
    sweep = plan_sweep(load_config([checkout / "configs/config.yaml"], {}))
    with pytest.raises(InputError, match=r"no planned point is served by engine 'vllm'; allowed: llamacpp"):
        bundles.points_of(sweep, "vllm")
    (checkout / "configs/environments/workflow.txt").unlink()
    sweep = plan_sweep(load_config([checkout / "configs/config.yaml"], {}))
    with pytest.raises(InputError, match=r"no lock of environment workflow"):
        bundles.locks_of(sweep.points.values(), sweep)


def test_a_trimmed_wheel_lacks_the_files_and_their_record(tmp_path):
    wheel = write_wheel(tmp_path, "engine", "1.0", {"engine/fa2.so": "x" * 999, "engine/fa3.so": "y"})
    for name in ("a", "b"):
        repack(wheel, ("engine/fa2*",), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes(), "equal content, equal bytes"
    with zipfile.ZipFile(tmp_path / "a") as trimmed:
        assert "engine/fa2.so" not in trimmed.namelist()
        assert "engine/fa3.so" in trimmed.namelist()
        record = trimmed.read("engine-1.0.dist-info/RECORD").decode()
    assert "fa2" not in record
    assert "fa3" in record


def test_a_pattern_that_matches_nothing_is_refused(tmp_path):
    wheel = write_wheel(tmp_path, "engine", "1.0", {})
    with pytest.raises(InputError, match=r"nothing in engine-1.0-py3-none-any.whl matches 'engine/fa4\*'"):
        repack(wheel, ("engine/fa4*",), tmp_path / "out")


# ------------------------------------------------------------------------------------------------ parts and archives
@pytest.mark.parametrize("size", [1, 7, 100, 1000, 1001, 5000])
def test_archives_are_read_back_from_parts_of_any_size(tmp_path, size):
    data = [bytes(range(256)) * 3 + b"first", b"second" * 40]
    files = [tmp_path / f"archive-{i}" for i in range(2)]
    for file, content in zip(files, data, strict=True):
        file.write_bytes(content)
    parts = cut(files, size, tmp_path)
    assert [part.bytes for part in parts[:-1]] == [size] * (len(parts) - 1)
    paths = [tmp_path / part.file for part in parts]
    assert all(file_sha256(path) == part.sha256 for path, part in zip(paths, parts, strict=True))
    offset = 0
    for content in data:
        with Joined(paths, offset, len(content)) as joined:
            assert b"".join(iter(lambda stream=joined: stream.read(64), b"")) == content
        offset += len(content)


def test_parts_of_an_earlier_bundle_go(tmp_path):
    (tmp_path / "archive").write_bytes(bytes(50))
    assert len(cut([tmp_path / "archive"], 10, tmp_path)) == 5
    assert len(cut([tmp_path / "archive"], 30, tmp_path)) == 2
    assert sorted(path.name for path in tmp_path.glob("part-*")) == ["part-1", "part-2"]


def test_what_has_not_changed_is_not_compressed_again(tmp_path):
    (tmp_path / "file").write_text("content")
    said = []
    first = compress(Content("packages", "wheels", {"file": tmp_path / "file"}), tmp_path / "archives", said.append)
    before = first.read_bytes()
    assert compress(Content("packages", "wheels", {"file": tmp_path / "file"}), tmp_path / "archives", said.append)
    assert len(said) == 1
    first.unlink()
    again = compress(Content("packages", "wheels", {"file": tmp_path / "file"}), tmp_path / "archives", said.append)
    assert again.read_bytes() == before, "the node must not be carried the same content twice"


# ------------------------------------------------------------------------------------------------ on the node
def test_parts_that_come_one_after_another_become_a_place_to_measure(checkout, tmp_path):
    made = bundle_of(checkout, trim={"aiperf": ("aiperf/large/*",)})
    assert len(made.parts) >= 3
    root, arriving = tmp_path / "node", tmp_path / "arriving"
    root.mkdir()
    arriving.mkdir()
    shutil.copy(checkout / ".bundle/bundle.json", arriving)
    for part in made.parts:
        assert not list(root.glob(".envs/*/environment.json")), "nothing is ready before all of it is here"
        for old in arriving.glob("part-*"):
            old.unlink()
        shutil.copy(checkout / ".bundle" / part.file, arriving)
        done, missing = unbundle(arriving, root)
    assert missing == []
    assert len(done) == 3
    for environment in made.environments:
        found = Environment.read(root / ".envs" / environment.key / "environment.json")
        assert found.packages == environment.packages
        assert found.packages["pydantic"] == HERE["pydantic"], "the node's own"
    assert found.python == platform.python_version()
    client = next(one for one in made.environments if one.name == "aiperf")
    folder = root / ".envs" / client.key
    assert Environment.read(folder / "environment.json").trimmed == {"aiperf": ("aiperf/large/*",)}
    assert not list(folder.glob("lib/*/site-packages/aiperf/large"))
    script = subprocess.run([folder / "bin/aiperf"], capture_output=True, text=True, check=True)
    assert script.stdout == "aiperf 0.13.0\n"
    # One command from there: the link leads to an interpreter that has what the lock left to the node, and no more.
    own = [root / ".envs/workflow/bin/python", "-c", "import pydantic, runner; runner.main(); import psutil"]
    ran = subprocess.run(own, capture_output=True, text=True, check=False)
    assert ran.stdout == "runner 2.0\n"
    assert ran.stderr.endswith("ModuleNotFoundError: No module named 'psutil'\n")
    point = Point.read(root / f"results/points/{made.points[0]}.json")
    assert TraceManifest.read(root / f"results/traces/{point.trace.key}/trace_set.json").sessions == 24
    assert (root / f"results/models/{point.model_key}/model.gguf").is_file()


def test_of_a_made_model_what_the_engine_loads_is_carried_and_no_more(checkout, tmp_path):
    sweep = plan_sweep(load_config([checkout / "configs/demo-vllm/config.yaml"], {}))
    (point, *_) = bundles.points_of(sweep, "vllm")
    (wheel,) = checkout.rglob("aiperf-*.whl")
    bundles.write_inputs([point], sweep, {point.replay.client: wheel}, tmp_path / "packed/inputs")
    for engine, weights in (("vllm", "checkpoint/model.safetensors"), ("llamacpp", "model.gguf")):
        tree = bundles.contents_of(tmp_path / "packed/inputs", {}, engine)[0].files
        model = f"results/models/{point.model_key}"
        assert f"{model}/{weights}" in tree
        assert (f"{model}/model.gguf" in tree) == (engine == "llamacpp")


def test_an_environment_with_the_nodes_torch_sees_all_of_the_nodes_packages(checkout, tmp_path, monkeypatch):
    monkeypatch.setattr(installer, "BOUND_TO_ITS_PLACE", "pydantic")
    bundle_of(checkout)
    (tmp_path / "node").mkdir()
    unbundle(checkout / ".bundle", tmp_path / "node")
    seen = [tmp_path / "node/.envs/workflow/bin/python", "-c", "import psutil, pydantic; print(pydantic.__file__)"]
    assert str(tmp_path) not in subprocess.run(seen, capture_output=True, text=True, check=True).stdout


def test_installing_again_changes_nothing(checkout, tmp_path, capsys):
    bundle_of(checkout)
    arguments = [str(checkout / ".bundle"), "--into", str(tmp_path / "node"), "--complete"]
    (tmp_path / "node").mkdir()
    assert main(arguments) == 0
    files = sorted((tmp_path / "node").glob(".envs/*/environment.json"))
    before = [file.stat().st_mtime_ns for file in files]
    capsys.readouterr()
    assert main(arguments) == 0
    assert [file.stat().st_mtime_ns for file in files] == before
    assert capsys.readouterr().out.count("is there") == 3
    shutil.rmtree(tmp_path / "node/results")
    assert main(arguments) == 0
    assert list((tmp_path / "node/results/points").iterdir()), "inputs that were lost are laid out again"


def test_an_environment_that_was_cut_off_is_made_anew(checkout, tmp_path):
    made = bundle_of(checkout)
    root = tmp_path / "node"
    half = root / ".envs" / made.environments[0].key
    (half / "bin").mkdir(parents=True)
    (half / "bin/python").write_text("half")
    (root / ".envs/.bundle/unpacking-x").mkdir(parents=True)
    unbundle(checkout / ".bundle", root)
    assert (half / "environment.json").is_file()
    assert not list(root.glob(".envs/.bundle/unpacking-*"))


def test_a_damaged_part_is_named_and_nothing_of_it_is_used(checkout, tmp_path, capsys):
    made = bundle_of(checkout)
    path = checkout / ".bundle" / made.parts[1].file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    root = tmp_path / "node"
    root.mkdir()
    assert main([str(checkout / ".bundle"), "--into", str(root)]) == 2
    said = capsys.readouterr().err
    assert f"{path}: damaged" in said
    assert "carry it again" in said
    assert "Traceback" not in said
    assert not list(root.glob(".envs/*/environment.json"))
    assert len(list(root.glob(".envs/.bundle/*.part"))) == len(made.parts) - 1, "the good ones need not come again"


def test_a_missing_part_is_named(checkout, tmp_path, capsys):
    made = bundle_of(checkout)
    (checkout / ".bundle" / made.parts[-1].file).unlink()
    arguments = [str(checkout / ".bundle"), "--into", str(tmp_path)]
    assert main(arguments) == 0
    assert f"still to come: {made.parts[-1].file}" in capsys.readouterr().out
    assert main([*arguments, "--complete"]) == 2, "what is chained after it must not start"


def test_another_node_is_refused(checkout):
    made = json.loads(bundle_of(checkout).to_json())
    with pytest.raises(Refused, match=rf"pydantic 1.0 here, {HERE['pydantic']} in the bundle"):
        check_node(made, {"pydantic": "1.0"}.get)
    with pytest.raises(Refused, match=r"pydantic is not installed here"):
        check_node(made, lambda _name: None)
    with pytest.raises(Refused, match=r"the bundle is for 3\.2\.1; start it with that one"):
        check_node({**made, "python": "3.2.1"})


def test_a_manifest_that_is_missing_or_of_another_version_is_refused(tmp_path):
    with pytest.raises(Refused, match=r"no such file; carry bundle.json with every part"):
        read_manifest(tmp_path)
    (tmp_path / "bundle.json").write_text('{"schema_version": 99}')
    with pytest.raises(Refused, match=r"found 99; allowed: 1"):
        read_manifest(tmp_path)
    assert Bundle.SCHEMA_VERSION == installer.SCHEMA_VERSION


def test_a_node_describes_itself_as_a_bundle_wants_it(tmp_path, capsys):
    assert main(["--describe"]) == 0
    path = tmp_path / "node.yaml"
    path.write_text(capsys.readouterr().out)
    found = yamlfile.validate(Node, yamlfile.load(path), path)
    assert found.python == platform.python_version()
    assert found.packages["pydantic"] == HERE["pydantic"]


def test_the_installer_needs_nothing_but_python(project):
    # -S: no installed package is seen, as on a node that has none of the project's.
    argv = [sys.executable, "-S", "-m", "workflow.unbundle", "--help"]
    assert subprocess.run(argv, cwd=project, capture_output=True, check=False).returncode == 0


def test_the_command_line_writes_a_readme_with_the_commands_for_both_sides(checkout, capsys):
    (checkout / "node.yaml").write_text(json.dumps(node().model_dump(mode="json")))
    arguments = ["--engine", "llamacpp", "--node", "node.yaml", "--part-bytes", "50000"]
    assert bundles.main(arguments) == 0
    assert "4 points in" in capsys.readouterr().out
    text = (checkout / ".bundle/README.txt").read_text()
    made = Bundle.read(checkout / ".bundle/bundle.json")
    assert f"-m workflow.runs results/points/{made.points[0]}.json results/runs/{made.points[0]}" in text
    assert "--configfile configs/config.yaml --config partial=true" in text
    assert all(point in text for point in made.points)


def test_a_file_that_is_laid_over_another_is_bundled_as_it_is_planned(checkout):
    (checkout / "node.yaml").write_text(json.dumps(node().model_dump(mode="json")))
    (checkout / "more.yaml").write_text("repeats: 2\n")
    files = ["configs/config.yaml", "more.yaml"]
    assert bundles.main(["--engine", "llamacpp", "--node", "node.yaml", "--configfile", *files]) == 0
    assert len(Bundle.read(checkout / ".bundle/bundle.json").points) == 8
    assert f"--configfile {' '.join(files)} --config" in (checkout / ".bundle/README.txt").read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--part-bytes", "0"], "--part-bytes: found 0; allowed: a number of bytes above 0"),
        (["--node", "missing.yaml"], "missing.yaml"),
        (["--engine", "vllm"], "no planned point is served by engine 'vllm'"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_message(checkout, capsys, arguments, says):
    (checkout / "node.yaml").write_text(json.dumps(node().model_dump(mode="json")))
    assert bundles.main(["--engine", "llamacpp", "--node", "node.yaml", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_make_passes_on_what_the_docs_say(project):
    text = (project / "docs/first-sweep.md").read_text()
    words = re.search(r"^make (bundle .*?) +#", text, re.MULTILINE)[1].split()
    done = subprocess.run(["make", "-n", *words], cwd=project, capture_output=True, text=True, check=True)
    assert "--engine vllm --configfile my/config.yaml --node node.yaml" in done.stdout
    assert "--part-bytes 60000000" in done.stdout


def test_make_takes_the_two_files_of_the_h200_examples_check(project):
    text = (project / "docs/examples/h200/README.md").read_text()
    (command,) = (
        shlex.split(line) for line in text.splitlines() if line.startswith("make bundle") and "kv-check" in line
    )
    done = subprocess.run(["make", "-n", *command[1:]], cwd=project, capture_output=True, text=True, check=True)
    folder = "docs/examples/h200/configs"
    assert f"--configfile {folder}/config.yaml {folder}/kv-check.yaml --node {folder}/node.yaml" in done.stdout


def test_make_wants_to_know_the_engine(project):
    done = subprocess.run(["make", "-n", "bundle"], cwd=project, capture_output=True, text=True, check=True)
    assert "Say which points: make bundle ENGINE=vllm" in done.stdout


# ------------------------------------------------------------------------------------------------ vllm_check.py
def test_a_serve_command_is_read_with_its_placeholders_filled(project, tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("vllm_check", project / "workflow/engines/vllm_check.py")
    checker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(checker)
    monkeypatch.chdir(project)
    sweep = plan_sweep(load_config([project / "docs/examples/h200/configs/config.yaml"], {}))
    for point in sweep.points.values():
        argv, env = checker.command_of(json.loads(point.to_json()), Path("/model"), tmp_path)
        assert argv[0] == "/model"
        assert not [word for word in (*argv, *env.values()) if "<path:" in word or "<port:" in word]
        assert env["PYTHONHASHSEED"] == "0"
        if "--kv-transfer-config" in argv:
            json.loads(argv[argv.index("--kv-transfer-config") + 1])
