"""Environments hold exactly what their lock says."""

import subprocess
import zipfile

import pytest

from workflow.contract import InputError
from workflow.environments import Environment, environment_key, prepare

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
