"""A wheel with a patch of one's own is another version, and says so wherever it is named."""

import subprocess
import sys
import zipfile

import pytest

from tests.unit.test_bundle import write_wheel
from workflow.contract import InputError
from workflow.patch_wheel import main, patch_wheel

PATCH = """Say it better.
--- a/greeting/words.py
+++ b/greeting/words.py
@@ -1,2 +1,2 @@
-WORD = "hallo"
+WORD = "hello"
 END = "!"
"""


@pytest.fixture
def wheel(tmp_path):
    return write_wheel(tmp_path, "greeting", "1.2", {"greeting/words.py": 'WORD = "hallo"\nEND = "!"\n'})


@pytest.fixture
def patch(tmp_path):
    path = tmp_path / "fix.patch"
    path.write_text(PATCH)
    return path


def test_the_patched_wheel_installs_under_its_own_version(wheel, patch, tmp_path):
    built = patch_wheel(wheel, patch, "better.word", tmp_path / "wheels")
    assert built.name == "greeting-1.2+better.word-py3-none-any.whl"
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(site)]
    subprocess.run([*pip, str(built)], check=True)
    says = "from importlib.metadata import version; import greeting.words as w; print(version('greeting'), w.WORD)"
    done = subprocess.run([sys.executable, "-c", says], cwd=site, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1.2+better.word", "hello"]


def test_the_same_patch_gives_the_same_bytes(wheel, patch, tmp_path):
    first, second = (patch_wheel(wheel, patch, "x", tmp_path / name).read_bytes() for name in ("one", "two"))
    assert first == second


def test_a_patch_for_another_release_is_refused_and_leaves_no_wheel(tmp_path, patch, capsys):
    other = write_wheel(tmp_path, "greeting", "1.3", {"greeting/words.py": 'WORD = "moin"\nEND = "!"\n'})
    out = tmp_path / "wheels"
    assert main([str(other), "--patch", str(patch), "--label", "x", "--out", str(out)]) == 2
    assert "fix.patch: the patch does not fit this wheel" in capsys.readouterr().err
    assert not out.exists()


def test_a_hunk_that_fits_elsewhere_is_refused_too(tmp_path, patch):
    moved = write_wheel(tmp_path, "greeting", "1.3", {"greeting/words.py": '# Words.\nWORD = "hallo"\nEND = "!"\n'})
    with pytest.raises(InputError, match="does not fit"):
        patch_wheel(moved, patch, "x", tmp_path / "wheels")


@pytest.mark.parametrize("label", ["", "Fixed", "a+b", "a..b", "a b"])
def test_a_label_that_no_version_may_have_is_refused(wheel, patch, tmp_path, label):
    with pytest.raises(InputError, match="--label"):
        patch_wheel(wheel, patch, label, tmp_path / "wheels")


def test_a_missing_wheel_or_patch_is_named(wheel, patch, tmp_path):
    with pytest.raises(InputError, match=r"gone-1\.0-py3-none-any\.whl"):
        patch_wheel(tmp_path / "gone-1.0-py3-none-any.whl", patch, "x", tmp_path)
    with pytest.raises(InputError, match=r"gone\.patch"):
        patch_wheel(wheel, tmp_path / "gone.patch", "x", tmp_path)


def test_every_file_of_the_patched_wheel_is_in_its_record(wheel, patch, tmp_path):
    with zipfile.ZipFile(patch_wheel(wheel, patch, "x", tmp_path / "wheels")) as built:
        recorded = [line.split(",")[0] for line in built.read("greeting-1.2+x.dist-info/RECORD").decode().splitlines()]
        assert sorted(recorded) == sorted(built.namelist())


def test_files_that_a_patch_adds_and_removes_are_added_and_removed(tmp_path):
    wheel = write_wheel(tmp_path, "greeting", "1.2", {"greeting/old.py": "A = 1\n", "greeting/offset.py": "B = 1\n"})
    patch = tmp_path / "fix.patch"
    patch.write_text(
        "--- a/greeting/old.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-A = 1\n"
        "--- /dev/null\n+++ b/greeting/fresh.py\n@@ -0,0 +1 @@\n+C = 1\n"
        "--- a/greeting/offset.py\n+++ b/greeting/offset.py\n@@ -1 +1 @@\n-B = 1\n+B = 2\n"
    )
    with zipfile.ZipFile(patch_wheel(wheel, patch, "x", tmp_path / "wheels")) as built:
        names = set(built.namelist())
        assert built.read("greeting/offset.py") == b"B = 2\n"
    assert "greeting/fresh.py" in names
    assert "greeting/old.py" not in names


def test_a_wheel_whose_metadata_is_of_another_version_is_refused(tmp_path, patch, wheel):
    renamed = tmp_path / "greeting-1.3-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(renamed, "w") as new:
        for name in old.namelist():
            new.writestr(name.replace("1.2.dist-info", "1.3.dist-info"), old.read(name))
    with pytest.raises(InputError, match=r"METADATA does not say that this is version 1\.3"):
        patch_wheel(renamed, patch, "x", tmp_path / "wheels")


def test_another_patch_under_the_same_label_is_refused(wheel, patch, tmp_path):
    built = patch_wheel(wheel, patch, "x", tmp_path / "wheels")
    before = built.read_bytes()
    patch.write_text(PATCH.replace("hello", "howdy"))
    with pytest.raises(InputError, match=r"--label: .* is there with another content; choose another label"):
        patch_wheel(wheel, patch, "x", tmp_path / "wheels")
    assert built.read_bytes() == before
    assert list((tmp_path / "wheels").iterdir()) == [built]
