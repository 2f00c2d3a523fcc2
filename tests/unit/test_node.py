import json

import pytest

from workflow.node import oom_kills, path_facts, read_facts


@pytest.fixture
def machine(tmp_path):
    """Return a made-up root with the files that facts are read from."""
    files = {
        "proc/meminfo": "MemTotal:       1024 kB\nMemAvailable:    512 kB\nHugePages_Total:       0\n",
        "proc/self/cgroup": "0::/slurm/job_7\n",
        "sys/fs/cgroup/slurm/memory.max": "4096\n",
        "sys/fs/cgroup/slurm/job_7/memory.max": "max\n",
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release\n",
        "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
        "sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN\n",
        "dev/nvidia0": "",
        "dev/nvidia1": "",
        "dev/nvidiactl": "",
        "dev/shm/vllm_offload_1.mmap": "",
        "dev/shm/sem.mine": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_facts_are_read_from_files(machine):
    facts = read_facts({}, machine, machine)
    assert (facts.dram_total_bytes, facts.dram_available_bytes) == (1024 * 1024, 512 * 1024)
    assert facts.cgroup_limit_bytes == 4096
    assert facts.gpus_visible == 2
    assert facts.driver_major == 580
    assert facts.rdma_active == ("mlx5_0",)
    assert facts.shm_leftovers == ("vllm_offload_1.mmap",)


def test_what_a_machine_does_not_say_is_unknown_and_not_zero(tmp_path):
    facts = read_facts({}, tmp_path / "nowhere", tmp_path)
    for name in ("dram_total_bytes", "gpus_visible", "driver_major", "rdma_active", "shm_free_bytes", "shm_leftovers"):
        assert getattr(facts, name) is None, name
    assert facts.cgroup_limit_bytes is None
    assert facts.scratch_free_bytes is None


def test_a_folder_with_a_config_is_no_checkpoint_before_every_shard_is_there(tmp_path):
    assert not path_facts(tmp_path / "gone").exists
    (tmp_path / "config.json").write_text("{}")
    assert path_facts(tmp_path).shards_missing is None
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors", "c": "one.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "one.safetensors").write_bytes(b"")
    facts = path_facts(tmp_path)
    assert (facts.shards_named, facts.shards_missing, facts.has_config) == (2, 1, True)


def test_an_index_that_was_cut_off_counts_as_missing_weights(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": ')
    assert path_facts(tmp_path).shards_missing == 1


def test_processes_that_the_kernel_killed_for_memory_are_counted(machine):
    assert oom_kills(machine) is None
    (machine / "sys/fs/cgroup/slurm/job_7/memory.events").write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    assert oom_kills(machine) == 2
