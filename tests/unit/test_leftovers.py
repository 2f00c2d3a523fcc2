"""Shared memory is removed where it is ours and nobody has it open, and nowhere else."""

import mmap
import os
import shutil
import sys
import uuid
from pathlib import Path

import pytest

from workflow import leftovers, processes
from workflow.leftovers import SHM, note, remove, used_bytes

HOLD = """
import mmap, sys
with open(sys.argv[1], "w+b") as f:
    f.write(bytes(8192)); f.flush()
    m = mmap.mmap(f.fileno(), 8192)
print("up", flush=True)
sys.stdin.read() if len(sys.argv) < 3 else __import__("time").sleep(60)
"""

pytestmark = pytest.mark.skipif(not SHM.is_dir(), reason="this machine has no /dev/shm")


@pytest.fixture(params=["vllm_offload", "lmcache_l1_pool"], ids=["V1 vLLM's region", "L10 LMCache's pool"])
def name(request):
    made = f"{request.param}_test_{uuid.uuid4().hex}.mmap"
    yield made
    (SHM / made).unlink(missing_ok=True)


@pytest.fixture
def server(name, tmp_path):
    """Return a marked process that maps a file of /dev/shm, with its descriptor closed."""
    token = f"test-{uuid.uuid4().hex}"
    argv = (sys.executable, "-c", HOLD, str(SHM / name), "stay")
    process = processes.start("server", argv, {}, tmp_path / "server.log", token)
    assert processes.wait_until(lambda: "up" in process.log.read_text(), 20)
    yield process
    processes.sweep(token, grace_s=0.2)


def test_a_file_of_a_killed_server_is_removed_once_it_is_gone(server, name, tmp_path):
    note(tmp_path, processes.members(server.token))
    assert remove([tmp_path]) == []
    assert (SHM / name).exists()
    processes.stop(server, 0.1)
    assert remove([tmp_path]) == [f"{name} (8192 bytes)"]
    assert not (SHM / name).exists()


def test_a_file_that_another_process_has_mapped_stays(server, name, tmp_path):
    note(tmp_path, processes.members(server.token))
    with (SHM / name).open("r+b") as stream:
        held = mmap.mmap(stream.fileno(), 8192)
    processes.stop(server, 0.1)
    assert remove([tmp_path]) == []
    held.close()
    assert remove([tmp_path]) != []


def test_another_file_of_the_same_name_stays(server, name, tmp_path):
    note(tmp_path, processes.members(server.token))
    processes.stop(server, 0.1)
    shutil.copy(SHM / name, SHM / f"{name}.new")
    (SHM / f"{name}.new").rename(SHM / name)
    assert remove([tmp_path]) == []
    assert (SHM / name).exists()


def test_a_file_of_another_node_stays(server, tmp_path, monkeypatch):
    note(tmp_path, processes.members(server.token))
    processes.stop(server, 0.1)
    monkeypatch.setattr(leftovers.socket, "gethostname", lambda: "another-host")
    assert remove([tmp_path]) == []
    monkeypatch.undo()
    assert remove([tmp_path]) != []


def test_strangers_files_are_not_noted(name, tmp_path):
    (SHM / name).write_bytes(b"x")
    note(tmp_path, processes.members("nobody"))
    assert not (tmp_path / leftovers.LEDGER).exists()
    assert remove([tmp_path]) == []


def test_used_bytes(tmp_path):
    facts = os.statvfs(SHM)
    assert 0 <= used_bytes() <= facts.f_frsize * facts.f_blocks
    assert used_bytes(Path(tmp_path / "none")) is None
