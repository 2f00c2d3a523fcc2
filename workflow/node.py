"""What is known about the machine a point runs on: declared facts at plan time, read ones inside the job.

Every fact may be unknown (None): a rule that needs it then says nothing. Reading takes files only, and starts nothing.
"""

import os
import re
import resource
from pathlib import Path

from workflow.contract import InputError, Strict, read_json
from workflow.matrix import Runners
from workflow.serving import gpu_family

MIB = 1_048_576

# Names that offload regions of the engines have in /dev/shm; a killed server leaves them there at full size.
SHM_LEFTOVERS = re.compile(r"^(vllm_offload_.*\.mmap|lmcache_l1_pool_.*|lmcache.*_shm.*)$")

# Variables that turn an arm into another one, or a server into a different one, when they are inherited.
WATCHED_VARIABLES = (
    "HIP_VISIBLE_DEVICES",
    "LMCACHE_CONFIG_FILE",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "ROCR_VISIBLE_DEVICES",
    "VLLM_USE_SIMPLE_KV_OFFLOAD",
)


class PathFacts(Strict):
    """What lies under a path placeholder."""

    exists: bool
    shards_named: int | None = None
    """Weight files that the checkpoint's index names; None: it has no index."""
    shards_missing: int | None = None
    """Of these, how many are not there."""
    has_config: bool | None = None


class NodeFacts(Strict):
    """Facts about one machine as one point may use it."""

    gpu: str | None = None
    """GPU family, as in a runner label: b200."""
    gpus_visible: int | None = None
    gpu_memory_used_share: float | None = None
    """Highest share in use over the visible GPUs, before anything is started."""
    driver_major: int | None = None
    """Of NVIDIA's driver."""
    cores: int | None = None
    dram_total_bytes: int | None = None
    dram_available_bytes: int | None = None
    cgroup_limit_bytes: int | None = None
    """Memory limit of the job's control group; None: unknown or none."""
    shm_size_bytes: int | None = None
    shm_free_bytes: int | None = None
    shm_leftovers: tuple[str, ...] | None = None
    """Files in /dev/shm that a server left behind."""
    memlock_bytes: int | None = None
    """Limit of locked memory; -1 is no limit."""
    open_files: int | None = None
    free_ports: int | None = None
    scratch_free_bytes: int | None = None
    rdma_active: tuple[str, ...] | None = None
    """RDMA devices whose first port is ACTIVE."""
    env: dict[str, str] | None = None
    """Inherited variables, of those that matter."""
    packages: dict[str, str] | None = None
    """Installed distributions of the serving image -> version."""
    paths: dict[str, PathFacts] = {}
    """Path placeholder -> what lies there; one that is not listed is unknown."""


def declared_facts(runner: str, runners: Runners) -> NodeFacts:
    """Return what runners.yaml says about a cluster's nodes."""
    hardware = runners.hardware.get(runner)
    if hardware is None:
        return NodeFacts(gpu=gpu_family(runner))
    return NodeFacts(
        gpu=gpu_family(runner),
        gpus_visible=hardware.gpus_per_node,
        dram_total_bytes=hardware.available_cpu_dram_mib * MIB,
    )


def read_facts(paths: dict[str, Path], scratch: Path, root: Path = Path("/")) -> NodeFacts:
    """Read what this machine says about itself; `paths` are the plan's placeholders, `root` is where / is."""
    memory = _meminfo(root / "proc/meminfo")
    return NodeFacts(
        gpus_visible=_gpus(root),
        gpu_memory_used_share=_amd_memory_share(root),
        driver_major=_driver_major(root),
        cores=len(os.sched_getaffinity(0)),
        dram_total_bytes=memory.get("MemTotal"),
        dram_available_bytes=memory.get("MemAvailable"),
        cgroup_limit_bytes=_cgroup_limit(root),
        shm_size_bytes=_disk(root / "dev/shm", total=True),
        shm_free_bytes=_disk(root / "dev/shm"),
        shm_leftovers=_leftovers(root / "dev/shm"),
        memlock_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        scratch_free_bytes=_disk(scratch),
        rdma_active=_rdma_active(root),
        env={name: os.environ[name] for name in WATCHED_VARIABLES if name in os.environ},
        paths={name: path_facts(path) for name, path in paths.items()},
    )


def path_facts(path: Path) -> PathFacts:
    """Return what lies at a path: a folder with a config file is not a checkpoint before every shard is there."""
    if not path.exists():
        return PathFacts(exists=False)
    if not path.is_dir():
        return PathFacts(exists=True)
    config = (path / "config.json").is_file()
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return PathFacts(exists=True, has_config=config)
    try:
        shards = set(read_json(index)["weight_map"].values())
    except (InputError, KeyError, TypeError, AttributeError):
        # An index that cannot be read is a download that was cut off.
        return PathFacts(exists=True, has_config=config, shards_named=1, shards_missing=1)
    missing = sum(not (path / shard).is_file() for shard in shards)
    return PathFacts(exists=True, has_config=config, shards_named=len(shards), shards_missing=missing)


def _meminfo(path: Path) -> dict[str, int]:
    if not path.is_file():
        return {}
    found = re.findall(r"^(\w+):\s+(\d+) kB$", path.read_text(), re.MULTILINE)
    return {name: int(size) * 1024 for name, size in found}


def _cgroup_limit(root: Path) -> int | None:
    try:
        own = (root / "proc/self/cgroup").read_text().strip().rpartition("::")[2].lstrip("/")
    except OSError:
        return None
    limits = []
    folder = root / "sys/fs/cgroup" / own
    # The smallest limit on the way up counts.
    while folder != folder.parent and (root / "sys/fs/cgroup") in (folder, *folder.parents):
        text = (folder / "memory.max").read_text().strip() if (folder / "memory.max").is_file() else "max"
        limits += [int(text)] if text.isdigit() else []
        folder = folder.parent
    return min(limits, default=None)


def oom_kills(root: Path = Path("/")) -> int | None:
    """Return how many processes the kernel has killed for memory in the job's control group; None where unknown."""
    try:
        own = (root / "proc/self/cgroup").read_text().strip().rpartition("::")[2].lstrip("/")
        events = (root / "sys/fs/cgroup" / own / "memory.events").read_text()
    except OSError:
        return None
    found = re.search(r"^oom_kill (\d+)$", events, re.MULTILINE)
    return int(found[1]) if found else None


def _disk(path: Path, *, total: bool = False) -> int | None:
    if not path.is_dir():
        return None
    facts = os.statvfs(path)
    return facts.f_frsize * (facts.f_blocks if total else facts.f_bavail)


def _leftovers(folder: Path) -> tuple[str, ...] | None:
    if not folder.is_dir():
        return None
    return tuple(sorted(path.name for path in folder.iterdir() if SHM_LEFTOVERS.match(path.name)))


def _gpus(root: Path) -> int | None:
    nvidia = [path for path in (root / "dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    amd = list((root / "dev/dri").glob("renderD*")) if (root / "dev/kfd").exists() else []
    return len(nvidia) or len(amd) or None


def _amd_memory_share(root: Path) -> float | None:
    shares = []
    for used in (root / "sys/class/drm").glob("card*/device/mem_info_vram_used"):
        total = int((used.parent / "mem_info_vram_total").read_text())
        shares += [int(used.read_text()) / total] if total else []
    return max(shares, default=None)


def _driver_major(root: Path) -> int | None:
    path = root / "proc/driver/nvidia/version"
    found = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d+)\.", path.read_text()) if path.is_file() else None
    return int(found[1]) if found else None


def _rdma_active(root: Path) -> tuple[str, ...] | None:
    folder = root / "sys/class/infiniband"
    if not folder.is_dir():
        return None
    states = {path.parts[-4]: path.read_text() for path in folder.glob("*/ports/1/state")}
    return tuple(sorted(name for name, state in states.items() if "ACTIVE" in state))
