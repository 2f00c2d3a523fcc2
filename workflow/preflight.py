"""Refuse a doomed point before it queues: (point, plan, node facts) -> findings with stable codes. Pure.

Run at plan time with the cluster's declared facts and again inside the job with the real ones. A fact that is not known
makes its rules say nothing. `python -m workflow.preflight POINT.json ...` checks points, `--all --configs DIR` every
single-node agentic point of InferenceX's files, `--table` prints docs/preflight.md.
"""

import argparse
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from workflow.contract import Strict, reports_input_errors
from workflow.matrix import Row, Runners, load_runners
from workflow.node import NodeFacts, declared_facts
from workflow.plans import (
    RECIPES,
    backend_name,
    load_inferencex,
    plan_for,
    single_node_rows,
)
from workflow.points import Point
from workflow.recipes import load_recipes
from workflow.serving import FILE_TIER, GB, GIB, GPU_MEMORY_GB, ServePlan, Service, flags_of, gpu_family, ports_of

Severity = Literal["error", "warning"]


class PreflightFinding(Strict):
    """One rule that a point breaks."""

    code: str
    severity: Severity
    says: str
    """What was found, with its numbers."""
    do: str
    """What to change."""

    def __str__(self) -> str:
        """Return one line."""
        return f"{self.severity} {self.code}: {self.says}; {self.do}"


@dataclass(frozen=True)
class Subject:
    """What a rule looks at."""

    row: Row
    plan: ServePlan
    node: NodeFacts
    request_timeout_s: float
    layers: int | None = None
    """Of the model, where its shape is known."""

    @cached_property
    def flags(self) -> Mapping[str, tuple[str, ...]]:
        """Return the engine's flags."""
        return flags_of(self.plan.engine.argv)

    @cached_property
    def connector(self) -> Mapping[str, Any]:
        """Return the KV connector's configuration; empty without one."""
        values = self.flags.get("--kv-transfer-config", ())
        # A port stands in it as a placeholder without quotes.
        loaded = json.loads(re.sub(r":\s*<port:[a-z0-9-]+>", ": 0", values[0])) if values else {}
        return dict(loaded)

    @property
    def extra(self) -> Mapping[str, Any]:
        """Return the connector's own keys."""
        return dict(self.connector.get("kv_connector_extra_config", {}))

    @property
    def offloads(self) -> bool:
        """Tell whether the arm is meant to offload."""
        return self.row.kv_offloading != "none"

    @property
    def budget_bytes(self) -> int:
        """Return the host memory budget."""
        return self.row.total_cpu_dram_gb * GB

    @property
    def per_rank_bytes(self) -> int:
        """Return the pinned memory of one rank."""
        return self.plan.pinned_bytes // self.row.gpus

    def value(self, flag: str, service: Service | None = None) -> str | None:
        """Return a flag's value; None without it."""
        values = flags_of(service.argv).get(flag, ()) if service else self.flags.get(flag, ())
        return values[-1] if values else None

    def number(self, flag: str, service: Service | None = None) -> float | None:
        """Return a flag's value as a number; None without it or for another kind of value."""
        text = self.value(flag, service)
        return float(text) if text is not None and re.fullmatch(r"-?\d+(\.\d+)?", text) else None

    def services(self, prefix: str) -> tuple[Service, ...]:
        """Return the sidecars of a kind."""
        return tuple(service for service in self.plan.sidecars if service.name.startswith(prefix))


@dataclass(frozen=True)
class Rule:
    """One trap: how it is recognised, what it prevents, what to change."""

    code: str
    severity: Severity
    prevents: str
    do: str
    check: Callable[[Subject], str | None]
    """Return what was found, or None."""


RULES: dict[str, Rule] = {}


def rule(code: str, severity: Severity, prevents: str, do: str) -> Callable[[Callable[[Subject], str | None]], None]:
    """Enter a check into the table; raises ValueError for a code that is taken."""

    def enter(check: Callable[[Subject], str | None]) -> None:
        if code in RULES:
            raise ValueError(f"two rules have the code {code}")
        RULES[code] = Rule(code, severity, prevents, do, check)

    return enter


def preflight(point: Point, plan: ServePlan, node: NodeFacts) -> tuple[PreflightFinding, ...]:
    """Return the rules that a point breaks on a node, in the order of the table."""
    layers = (point.made_model or {}).get("layers")
    return check(point.row, plan, node, point.replay.request_timeout_s, layers)


def check(
    row: Row, plan: ServePlan, node: NodeFacts, request_timeout_s: float = 600.0, layers: int | None = None
) -> tuple[PreflightFinding, ...]:
    """Return the rules that a row's plan breaks on a node; for callers that have no point yet."""
    subject = Subject(row, plan, node, request_timeout_s, layers)
    found = []
    for entry in RULES.values():
        says = entry.check(subject)
        if says is not None:
            found.append(PreflightFinding(code=entry.code, severity=entry.severity, says=says, do=entry.do))
    return tuple(found)


def gib(size: float) -> str:
    """Return bytes as text in GiB."""
    return f"{size / GIB:,.0f} GiB"


# ------------------------------------------------------------------------------------------------ the plan itself
@rule(
    "plan_blocked",
    "error",
    "A node is held for a recipe that is known not to run as it stands.",
    "do what the recipe says, or leave the point out",
)
def _(s: Subject) -> str | None:
    return "; ".join(f"{blocker.code}: {blocker.says}" for blocker in s.plan.blocked_by) or None


@rule(
    "backend_version_open",
    "warning",
    "Nobody knows later which version was measured: the search space names none and any may be installed.",
    "give kv-offload-backend a version",
)
def _(s: Subject) -> str | None:
    loose = [name for name in s.plan.packages if "==" not in name]
    return f"no version for {', '.join(loose)}" if loose else None


@rule(
    "package_missing",
    "error",
    "The server dies at its first import, or another version is measured under this name.",
    "install the pinned package into the image or environment",
)
def _(s: Subject) -> str | None:
    if s.node.packages is None:
        return None
    wrong = []
    for pin in s.plan.packages:
        name, _, version = pin.partition("==")
        have = s.node.packages.get(name)
        if have is None or (version and have != version):
            wrong.append(f"{pin} (found {have or 'none'})")
    return f"missing: {', '.join(wrong)}" if wrong else None


@rule(
    "tool_parser_missing",
    "error",
    "Tool calls come back as raw text, so an agent's next turn differs from the recorded one.",
    "add the model's tool-call parser (and --enable-auto-tool-choice for vLLM) to the recipe",
)
def _(s: Subject) -> str | None:
    wanted = {
        "vllm": ("--tool-call-parser", "--enable-auto-tool-choice"),
        "sglang": ("--tool-call-parser",),
        "trt": ("--tool_parser",),
    }.get(s.row.framework, ())
    missing = [flag for flag in wanted if flag not in s.flags]
    return f"without {', '.join(missing)}" if missing else None


@rule(
    "hash_seed_missing",
    "error",
    "Equal prefixes get different keys in different processes, so an external tier is never hit.",
    "set PYTHONHASHSEED to one number in every service of the plan",
)
def _(s: Subject) -> str | None:
    if s.row.framework == "llamacpp":
        return None
    keyed = (s.plan.engine, *s.services("lmcache"))
    seeds = {service.name: service.env.get("PYTHONHASHSEED") for service in keyed}
    if None in seeds.values() or "random" in seeds.values() or len(set(seeds.values())) > 1:
        return ", ".join(f"{name}: PYTHONHASHSEED={seed or 'not set'}" for name, seed in seeds.items())
    return None


@rule(
    "prefix_caching_off",
    "error",
    "Without a prefix cache nothing is reused, and vLLM drops its offload connector with only a warning.",
    "remove the flag",
)
def _(s: Subject) -> str | None:
    off = [flag for flag in ("--no-enable-prefix-caching", "--disable-radix-cache") if flag in s.flags]
    return f"found {', '.join(off)}" if off else None


@rule(
    "metrics_off",
    "error",
    "Where prompt tokens came from cannot be read back, so no share can be published.",
    "switch the engine's metrics on",
)
def _(s: Subject) -> str | None:
    if s.row.framework == "vllm" and "--disable-log-stats" in s.flags:
        return "found --disable-log-stats"
    if s.row.framework == "sglang":
        missing = [flag for flag in ("--enable-metrics", "--enable-cache-report") if flag not in s.flags]
        return f"without {', '.join(missing)}" if missing else None
    return None


@rule(
    "bound_to_all_interfaces",
    "warning",
    "A server without authentication answers the whole network, and a stranger's requests are measured too.",
    "bind to 127.0.0.1",
)
def _(s: Subject) -> str | None:
    open_ones = [service.name for service in s.plan.services if "0.0.0.0" in service.argv]  # noqa: S104 - looked for
    return f"0.0.0.0 in {', '.join(open_ones)}" if open_ones else None


@rule(
    "control_offloads",
    "error",
    "The control is not a control: every comparison with it is wrong.",
    "take the offload flags out of the recipe",
)
def _(s: Subject) -> str | None:
    switches = (
        *("--kv-transfer-config", "--kv-offloading-size", "--kv_offloading_size"),
        *("--kv-offloading-backend", "--kv_offloading_backend", "--enable-hierarchical-cache"),
    )
    found = [flag for flag in switches if flag in s.flags]
    return f"arm none with {', '.join(found)}" if found and not s.offloads else None


@rule(
    "offload_without_switch",
    "error",
    "The arm serves without its tier and is published as offload.",
    "give the backend's plug-in its flags",
)
def _(s: Subject) -> str | None:
    if not s.offloads:
        return None
    switches = ("--kv-transfer-config", "--enable-hierarchical-cache", "--cache-ram")
    in_file = any(re.search(r"host_cache_size: [1-9]", file.text) for file in s.plan.files)
    on = in_file or any(flag in s.flags for flag in switches)
    return None if on else f"arm {s.plan.backend} has no offload flag in the engine's command"


@rule(
    "inherited_switch",
    "error",
    "An image's or user's variable turns the arm into another one, in silence.",
    "unset it before the job, or let the plan's `unset` do it",
)
def _(s: Subject) -> str | None:
    switches = ("VLLM_USE_SIMPLE_KV_OFFLOAD", "LMCACHE_CONFIG_FILE")
    if s.row.framework not in ("vllm", "atom") or s.node.env is None:
        return None
    live = [name for name in switches if name in s.node.env and name not in s.plan.engine.unset]
    return f"inherited {', '.join(live)}" if live else None


@rule(
    "simple_switch_set",
    "error",
    "Native offloading turns into the Simple connector, and two arms are one system.",
    "remove the variable from the recipe",
)
def _(s: Subject) -> str | None:
    name = "VLLM_USE_SIMPLE_KV_OFFLOAD"
    native = s.connector.get("kv_connector") != "SimpleCPUOffloadConnector"
    return f"the engine's env has {name}" if native and name in s.plan.engine.env else None


# ---------------------------------------------------------------------------------------------------- host memory
@rule(
    "budget_missing",
    "error",
    "A tier of zero bytes never hits, and costs what it costs.",
    "raise dram-utilization, or give the runner its memory in runners.yaml",
)
def _(s: Subject) -> str | None:
    return "offload with a host memory budget of 0 GB" if s.offloads and s.budget_bytes <= 0 else None


@rule(
    "tier_above_budget",
    "error",
    "The arm has more memory than the others: an unfair comparison, and a node that runs out.",
    "mend the unit: decimal GB, GiB, per rank, per pool",
)
def _(s: Subject) -> str | None:
    if s.plan.pinned_bytes <= s.budget_bytes:
        return None
    return f"{gib(s.plan.pinned_bytes)} pinned, budget {gib(s.budget_bytes)}"


@rule(
    "tier_below_half_budget",
    "warning",
    "The arm has a fraction of its budget, as happens where a per-rank value is divided twice.",
    "mend the unit, or say why in the recipe's host_reserve_gib",
)
def _(s: Subject) -> str | None:
    usable = s.budget_bytes - s.plan.cache.host_reserve_gib * GIB
    small = s.offloads and 0 < s.plan.pinned_bytes < usable / 2
    return f"{gib(s.plan.pinned_bytes)} of {gib(usable)}" if small else None


@rule(
    "tier_above_node",
    "error",
    "The host's out-of-memory killer ends the server while the tier fills, an hour into the run.",
    "lower dram-utilization",
)
def _(s: Subject) -> str | None:
    total = s.node.dram_total_bytes
    if total is None or s.plan.pinned_bytes <= 0.97 * total:
        return None
    return f"{gib(s.plan.pinned_bytes)} pinned on a node of {gib(total)}"


@rule(
    "tier_above_available",
    "error",
    "Other processes or a leftover hold the memory: the pool cannot be allocated.",
    "free the node's memory, see shm_leftovers",
)
def _(s: Subject) -> str | None:
    free = s.node.dram_available_bytes
    over = free is not None and s.plan.pinned_bytes > free
    return f"{gib(s.plan.pinned_bytes)} to pin, {gib(free or 0)} available" if over else None


@rule(
    "tier_above_cgroup",
    "error",
    "Slurm kills the job when the tier fills, although the node has memory left.",
    "ask for all of the node's memory (--mem=0)",
)
def _(s: Subject) -> str | None:
    limit = s.node.cgroup_limit_bytes
    return f"{gib(s.plan.pinned_bytes)} to pin, limit {gib(limit or 0)}" if _over(s.plan.pinned_bytes, limit) else None


@rule(
    "pinned_above_2_tb",
    "warning",
    "On Blackwell pinned memory past about 2 TB failed with cudaErrorMemoryAllocation or got the node killed.",
    "lower the tier's share, as LMCache's l1_share does",
)
def _(s: Subject) -> str | None:
    limited = gpu_family(s.row.runner) in ("b200", "b300") and s.plan.pinned_bytes > 2_000 * GB
    return f"{gib(s.plan.pinned_bytes)} pinned" if limited else None


@rule(
    "tier_below_device",
    "warning",
    "A tier that is smaller than the device's own cache is only ever written to.",
    "raise dram-utilization",
)
def _(s: Subject) -> str | None:
    device = GPU_MEMORY_GB.get(gpu_family(s.row.runner), 0) * GB * s.row.gpus
    small = s.offloads and 0 < s.plan.pinned_bytes < 0.1 * device
    return f"{gib(s.plan.pinned_bytes)} beside {gib(device)} of GPU memory" if small else None


@rule(
    "tier_sized_by_ratio",
    "warning",
    "The pool follows the device's, not the budget: its memory is known only after the start.",
    "state device_pool_gb in the recipe as measured",
)
def _(s: Subject) -> str | None:
    ratio = s.value("--hicache-ratio")
    return f"--hicache-ratio {ratio}, pinned memory unknown" if ratio and s.plan.pinned_bytes == 0 else None


@rule(
    "two_sizes",
    "error",
    "Which of the two counts depends on the release.",
    "keep one",
)
def _(s: Subject) -> str | None:
    both = "--hicache-ratio" in s.flags and "--hicache-size" in s.flags
    return "--hicache-size and --hicache-ratio" if both else None


@rule(
    "memlock_limited",
    "error",
    "Pinning fails, or the pool silently stays pageable and copies crawl.",
    "raise the limit: ulimit -l unlimited, in the container too",
)
def _(s: Subject) -> str | None:
    limit = s.node.memlock_bytes
    # Memory is locked for a GPU to copy from; a tier on a machine without one is ordinary memory.
    limited = (
        gpu_family(s.row.runner) in GPU_MEMORY_GB
        and s.offloads
        and limit is not None
        and 0 <= limit < s.plan.pinned_bytes
    )
    return f"memlock limit {gib(limit or 0)}, {gib(s.plan.pinned_bytes)} to pin" if limited else None


@rule(
    "pinned_pool_rounds_up",
    "error",
    "The kernel kills the engine while it allocates the tier, which takes up to twice what was asked for.",
    "choose a budget whose part of each layer is a power of two or a little below it",
)
def _(s: Subject) -> str | None:
    # Seen: 69 GB for 32 layers took 128 GiB, 68 GB took 64 GiB (vLLM 0.25.1). One tensor a layer comes from torch's
    # allocator of pinned memory, which rounds each up to a power of two; other connectors and specs map memory.
    native = s.connector.get("kv_connector") == "OffloadingConnector" and "spec_name" not in s.extra
    total = s.node.dram_total_bytes
    if not native or s.layers is None or total is None or s.per_rank_bytes <= 0:
        return None
    each = s.per_rank_bytes / s.layers
    taken = s.row.gpus * s.layers * 2 ** math.ceil(math.log2(each))
    if taken <= 0.97 * total:
        return None
    return (
        f"{s.layers} tensors of {each / GIB:.2f} GiB, each rounded up to a power of two: {gib(taken)} on a node of "
        f"{gib(total)}"
    )


@rule(
    "register_512_gib",
    "warning",
    "One cudaHostRegister of 512 GiB or more always fails before vLLM's chunked fix, as a CUDA out-of-memory later.",
    "use more ranks, a smaller tier, or an image with the fix",
)
def _(s: Subject) -> str | None:
    vllm = s.connector.get("kv_connector") in ("OffloadingConnector", "SimpleCPUOffloadConnector")
    return f"{gib(s.per_rank_bytes)} in one region" if vllm and s.per_rank_bytes >= 512 * GIB else None


# --------------------------------------------------------------------------------------------------------- /dev/shm
@rule(
    "shm_too_small",
    "error",
    "The region lies in /dev/shm: above its size the start fails with `Bad address` or `Insufficient space`.",
    "enlarge the tmpfs (mount -o remount,size=...), or lower the tier",
)
def _(s: Subject) -> str | None:
    free = s.node.shm_free_bytes
    in_shm = s.connector.get("kv_connector") == "OffloadingConnector"
    return (
        f"{gib(s.plan.pinned_bytes)}, /dev/shm has {gib(free or 0)}"
        if in_shm and _over(s.plan.pinned_bytes, free)
        else None
    )


@rule(
    "shm_below_lmcache",
    "error",
    "LMCache switches to a slow path that crashes when its pool does not fit /dev/shm.",
    "enlarge /dev/shm, or set lmcache.shared_memory: false in the recipe",
)
def _(s: Subject) -> str | None:
    free = s.node.shm_free_bytes
    shared = [server for server in s.services("lmcache") if "--shm-name" not in server.argv]
    if free is None or not shared or s.plan.pinned_bytes <= 0.9 * free:
        return None
    return f"L1 of {gib(s.plan.pinned_bytes)}, 90 % of /dev/shm is {gib(0.9 * free)}"


@rule(
    "shm_leftovers",
    "warning",
    "A killed server's region holds the memory: the next start fails, or dies without a word while it allocates.",
    "remove the files, after checking that no process has them open",
)
def _(s: Subject) -> str | None:
    return f"it holds {', '.join(s.node.shm_leftovers)}" if s.node.shm_leftovers else None


# ------------------------------------------------------------------------------------------------------------- GPUs
@rule(
    "gpus_too_few",
    "error",
    "The engine waits for ranks that never come, or dies after the node was allocated.",
    "ask for more GPUs, or lower tp, pp or pcp-size",
)
def _(s: Subject) -> str | None:
    visible = s.node.gpus_visible
    return f"{visible} visible, {s.row.gpus} needed" if visible is not None and visible < s.row.gpus else None


@rule(
    "gpu_family",
    "error",
    "A point measured on other hardware is published under this one's name.",
    "mend the cluster's partition or constraint",
)
def _(s: Subject) -> str | None:
    wanted = gpu_family(s.row.runner)
    known = wanted in GPU_MEMORY_GB and s.node.gpu is not None
    return f"{s.node.gpu} instead of {wanted}" if known and s.node.gpu != wanted else None


@rule(
    "gpu_memory_in_use",
    "error",
    "A server that was killed is still giving its memory back, or another job runs: the start fails in NCCL or RCCL.",
    "wait until the GPUs are free, or drain the node",
)
def _(s: Subject) -> str | None:
    used = s.node.gpu_memory_used_share
    return f"{used:.0%} of a GPU in use" if used is not None and used > 0.10 else None


@rule(
    "driver_too_old",
    "error",
    "An image built for CUDA 13 does not start below driver 580.",
    "update the driver, or take an image for CUDA 12",
)
def _(s: Subject) -> str | None:
    driver = s.node.driver_major
    cuda13 = re.search(r"cu-?13", s.row.image) is not None
    return f"driver {driver} for {s.row.image}" if cuda13 and driver is not None and driver < 580 else None


@rule(
    "hip_devices_unset",
    "error",
    "Slurm restricts ROCm by ROCR_VISIBLE_DEVICES; engines that read HIP_VISIBLE_DEVICES take GPUs of another job.",
    "export HIP_VISIBLE_DEVICES with the value of ROCR_VISIBLE_DEVICES",
)
def _(s: Subject) -> str | None:
    env = s.node.env or {}
    amd = gpu_family(s.row.runner).startswith("mi")
    unset = amd and "ROCR_VISIBLE_DEVICES" in env and "HIP_VISIBLE_DEVICES" not in env
    return f"ROCR_VISIBLE_DEVICES={env['ROCR_VISIBLE_DEVICES']} alone" if unset else None


# -------------------------------------------------------------------------------------------------- vLLM connectors
@rule(
    "server_wide_key",
    "error",
    "A per-rank value under the server-wide key is divided by the world size again: 1/TP of the budget.",
    "use cpu_bytes_to_use_per_rank",
)
def _(s: Subject) -> str | None:
    simple = s.connector.get("kv_connector") == "SimpleCPUOffloadConnector"
    value = s.extra.get("cpu_bytes_to_use")
    return f"cpu_bytes_to_use {value}" if simple and value is not None else None


@rule(
    "string_boolean",
    "error",
    'The string "false" is true in Python: the opposite mode is measured.',
    "write a JSON boolean",
)
def _(s: Subject) -> str | None:
    # vLLM itself reads this one as a string.
    strings = {"enable_cross_layers_blocks"}
    wrong = [name for name, value in s.extra.items() if value in ("true", "false") and name not in strings]
    return f"{', '.join(wrong)} is a string" if wrong else None


@rule(
    "offloading_size_unit",
    "error",
    "--kv_offloading_size is GiB: the budget's decimal GB in it are 7.4 % too much.",
    "convert, or use the connector's byte key",
)
def _(s: Subject) -> str | None:
    sizes = (s.number("--kv_offloading_size"), s.number("--kv-offloading-size"))
    wrong = [size for size in sizes if size is not None and size * GIB > s.budget_bytes]
    return f"{wrong[0]:g} GiB for a budget of {s.row.total_cpu_dram_gb} GB" if wrong else None


@rule(
    "load_failure_policy",
    "error",
    "The default frees blocks while a copy into them is in flight: an illegal memory access.",
    "set kv_load_failure_policy to recompute",
)
def _(s: Subject) -> str | None:
    remote = s.connector.get("kv_connector") in ("LMCacheMPConnector", "LMCacheConnectorV1", "MooncakeStoreConnector")
    policy = s.connector.get("kv_load_failure_policy")
    return f"policy {policy or 'not set'}" if remote and policy != "recompute" else None


@rule(
    "hybrid_manager_off",
    "error",
    "A model with several KV groups loses hits, and one with linear state does not start.",
    "remove --disable-hybrid-kv-cache-manager, or choose another backend",
)
def _(s: Subject) -> str | None:
    off = "--disable-hybrid-kv-cache-manager" in s.flags
    in_process = s.connector.get("kv_connector") == "LMCacheConnectorV1"
    return "linear state without the hybrid manager" if s.plan.cache.linear_state and (off or in_process) else None


@rule(
    "connector_module_path",
    "error",
    "vLLM takes its own shim, and on any import error a bundled class without hybrid-cache support.",
    "set kv_connector_module_path to LMCache's module",
)
def _(s: Subject) -> str | None:
    mp = s.connector.get("kv_connector") == "LMCacheMPConnector"
    return "no kv_connector_module_path" if mp and not s.connector.get("kv_connector_module_path") else None


@rule(
    "connector_host_scheme",
    "error",
    "The connector joins host and port into a ZeroMQ address; without tcp:// it cannot connect.",
    "write tcp://127.0.0.1 for the connector (and the bare host for the server)",
)
def _(s: Subject) -> str | None:
    hosts = [s.extra.get("lmcache.mp.host"), *str(s.extra.get("lmcache.mp.server_urls") or "").split(",")]
    wrong = [str(host) for host in hosts if host and not str(host).startswith("tcp://")]
    return f"found {', '.join(wrong)}" if wrong else None


@rule(
    "cumem_with_lmcache",
    "error",
    "cuMem memory has no legacy CUDA IPC handle: register_kv_caches fails with cudaErrorInvalidValue.",
    "drop --enable-cumem-allocator in this arm, and with `equalize` in the whole group",
)
def _(s: Subject) -> str | None:
    return "--enable-cumem-allocator" if s.services("lmcache") and "--enable-cumem-allocator" in s.flags else None


@rule(
    "expandable_segments_with_lmcache",
    "error",
    "Expandable segments cannot be exported through CUDA IPC, like cuMem memory.",
    "unset PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF in this arm",
)
def _(s: Subject) -> str | None:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    inherited = {name: value for name, value in (s.node.env or {}).items() if name not in s.plan.engine.unset}
    env = {**inherited, **s.plan.engine.env}
    wrong = [name for name in names if "expandable_segments:True" in env.get(name, "")]
    return f"{', '.join(wrong)} has expandable_segments" if s.services("lmcache") and wrong else None


# ---------------------------------------------------------------------------------------------------------- LMCache
@rule(
    "lease_below_message_timeout",
    "error",
    "A chunk that was promised at lookup may no longer be read at load: a crash, or a false miss.",
    "raise --l1-read-ttl-seconds above lmcache.mp.mq_timeout",
)
def _(s: Subject) -> str | None:
    timeout = float(s.extra.get("lmcache.mp.mq_timeout", 300))
    # 300 s is the server's default.
    leases = [s.number("--l1-read-ttl-seconds", server) or 300.0 for server in s.services("lmcache")]
    return f"lease {min(leases):g} s, timeout {timeout:g} s" if leases and min(leases) < timeout else None


@rule(
    "lease_below_request_timeout",
    "error",
    "A request may wait for longer than its hit stays readable.",
    "raise --l1-read-ttl-seconds above the client's request timeout",
)
def _(s: Subject) -> str | None:
    leases = [s.number("--l1-read-ttl-seconds", server) or 300.0 for server in s.services("lmcache")]
    short = leases and min(leases) < s.request_timeout_s
    return f"lease {min(leases):g} s, request timeout {s.request_timeout_s:g} s" if short else None


@rule(
    "chunk_not_multiple",
    "error",
    "LMCache refuses the model after the weights are loaded, or never finds a chunk.",
    "take a common multiple of every KV group's block, 3072 for blocks of 1536 and 3072",
)
def _(s: Subject) -> str | None:
    chunks = [s.number("--chunk-size", server) or 256.0 for server in s.services("lmcache")]
    chunks += [float(s.plan.engine.env["LMCACHE_CHUNK_SIZE"])] if "LMCACHE_CHUNK_SIZE" in s.plan.engine.env else []
    wrong = [(chunk, block) for chunk in chunks for block in s.plan.cache.block_tokens if chunk % block]
    return f"chunk {wrong[0][0]:g}, block {wrong[0][1]}" if wrong else None


@rule(
    "object_groups",
    "error",
    "Linear state and paged KV land in one object group, and nothing can be restored.",
    "start the LMCache server with --separate-object-groups",
)
def _(s: Subject) -> str | None:
    servers = s.services("lmcache")
    missing = [server.name for server in servers if "--separate-object-groups" not in server.argv]
    return f"{', '.join(missing)} without them" if s.plan.cache.linear_state and missing else None


@rule(
    "eviction_policy",
    "error",
    "IsolatedLRU kills its thread at the first watermark: the pool fills and every store is skipped.",
    "use LRU",
)
def _(s: Subject) -> str | None:
    used = {s.value("--eviction-policy", server) for server in s.services("lmcache")} - {"LRU"}
    return f"--eviction-policy {', '.join(sorted(str(policy) for policy in used))}" if used else None


@rule(
    "lmcache_total",
    "error",
    "--l1-size-gb is per server: the node's budget given to each of several is a multiple of it.",
    "divide the budget by the number of servers, and decimal GB into GiB",
)
def _(s: Subject) -> str | None:
    servers = s.services("lmcache")
    total = sum((s.number("--l1-size-gb", server) or 0) * GIB for server in servers)
    return f"{len(servers)} servers, {gib(total)}, budget {gib(s.budget_bytes)}" if total > s.budget_bytes else None


# --------------------------------------------------------------------------------------------------------- Mooncake
@rule(
    "mooncake_lease",
    "error",
    "The default lease of 5 s is shorter than one large load: the object is evicted while it is read.",
    "set --default_kv_lease_ttl to at least 30000 (milliseconds)",
)
def _(s: Subject) -> str | None:
    leases = [s.number("--default_kv_lease_ttl", master) or 5000.0 for master in s.services("mooncake-master")]
    return f"{leases[0] / 1000:g} s" if leases and leases[0] < 30_000 else None


@rule(
    "mooncake_watermark",
    "warning",
    "Each rank has a segment of its own: above 0.95 an uneven rank is full before anything is evicted.",
    "lower --eviction_high_watermark_ratio",
)
def _(s: Subject) -> str | None:
    marks = [s.number("--eviction_high_watermark_ratio", master) or 1.0 for master in s.services("mooncake-master")]
    return f"watermark {marks[0]:g}" if marks and marks[0] > 0.95 else None


@rule(
    "mooncake_segment_suffix",
    "error",
    "A size with a suffix is read in binary units: GB of a decimal budget are 7.4 % too much.",
    "write bytes",
)
def _(s: Subject) -> str | None:
    sizes = [str(config.get("global_segment_size", 0)) for config in _mooncake_configs(s)]
    wrong = [size for size in sizes if not size.isdigit()]
    return f"global_segment_size {wrong[0]}" if wrong else None


@rule(
    "rdma_down",
    "error",
    "A rail that is down ends in 20 retries that look like a store that hangs.",
    "name ACTIVE devices in backends.mooncake.device, or use tcp",
)
def _(s: Subject) -> str | None:
    active = s.node.rdma_active
    for config in _mooncake_configs(s):
        if config.get("protocol") != "rdma" or active is None:
            continue
        named = [name for name in str(config.get("device_name", "")).split(",") if name]
        down = [name for name in named if name not in active]
        if down:
            return f"{', '.join(down)} not ACTIVE"
        if not active:
            return "no device is ACTIVE"
    return None


# --------------------------------------------------------------------------------------------- scheduler and routers
@rule(
    "router_missing",
    "error",
    "Each turn lands on another DP rank and misses the prefix that its last turn left there.",
    "give the search-space line a router",
)
def _(s: Subject) -> str | None:
    needs = s.row.dp_attn and s.row.tp > 1 and s.plan.router is None and s.row.framework in ("vllm", "sglang")
    return f"{s.row.tp} DP ranks without a router" if needs else None


@rule(
    "router_not_sticky",
    "error",
    "A router that balances load sends the turns of a session to different ranks.",
    "use a consistent-hash policy and a session header",
)
def _(s: Subject) -> str | None:
    if s.plan.router is None:
        return None
    policy = s.value("--policy", s.plan.router) or "default"
    sticky = policy.startswith("consistent_hash") and s.plan.session_header is not None
    return None if sticky else f"policy {policy}, session header {s.plan.session_header or 'none'}"


@rule(
    "router_timeout",
    "error",
    "The router gives up on a request that the client still waits for, and the failure is counted against the engine.",
    "raise --request-timeout-secs above the client's request timeout",
)
def _(s: Subject) -> str | None:
    limit = s.number("--request-timeout-secs", s.plan.router) if s.plan.router else None
    return (
        f"{limit:g} s, client {s.request_timeout_s:g} s" if limit is not None and limit < s.request_timeout_s else None
    )


@rule(
    "router_retries",
    "warning",
    "A request that is sent twice is computed twice and measured once.",
    "add --disable-retries",
)
def _(s: Subject) -> str | None:
    retries = s.plan.router is not None and "--disable-retries" not in s.plan.router.argv
    return "the router retries" if retries else None


@rule(
    "keep_alive_short",
    "error",
    "The server closes an idle connection while the client reuses it: ECONNRESET in the warm-up ends the replay.",
    "set SGLANG_TIMEOUT_KEEP_ALIVE to at least 300",
)
def _(s: Subject) -> str | None:
    if s.row.framework != "sglang":
        return None
    seconds = float(s.plan.engine.env.get("SGLANG_TIMEOUT_KEEP_ALIVE", 5))
    return f"{seconds:g} s, the client keeps connections for 300 s" if seconds < 300 else None


@rule(
    "slots_below_concurrency",
    "warning",
    "Live sessions wait for a slot of the scheduler, not for the cache: the arm's queue is measured.",
    "raise max-num-seqs or max-running-requests to twice the concurrency",
)
def _(s: Subject) -> str | None:
    per = s.number("--max-num-seqs")
    total = per * (s.row.tp if s.row.dp_attn else 1) if per is not None else s.number("--max-running-requests")
    return f"{total:g} slots for {s.row.conc} sessions" if total is not None and total < s.row.conc else None


@rule(
    "graphs_below_batch",
    "warning",
    "Graph sizes are tokens: the largest decode batches, drafts included, run without a graph.",
    "capture multiples of (1 + draft tokens) up to max-num-seqs times that",
)
def _(s: Subject) -> str | None:
    compilation, speculative = s.value("--compilation-config"), s.value("--speculative-config")
    seqs = s.number("--max-num-seqs")
    if compilation is None or speculative is None or seqs is None:
        return None
    sizes = json.loads(compilation).get("cudagraph_capture_sizes")
    draft = int(json.loads(speculative).get("num_speculative_tokens", 0))
    if not sizes or max(sizes) >= seqs * (1 + draft):
        return None
    return f"largest graph {max(sizes)} tokens, batches reach {seqs * (1 + draft):g}"


@rule(
    "context_parallel_uneven",
    "error",
    "The engine refuses a decode context size that does not divide the tensor-parallel size.",
    "let dcp-size divide tp",
)
def _(s: Subject) -> str | None:
    return f"dcp-size {s.row.dcp_size}, tp {s.row.tp}" if s.row.tp % s.row.dcp_size else None


# -------------------------------------------------------------------------------------------------- files and limits
@rule(
    "path_missing",
    "error",
    "The server would download the model inside the allocation, or die.",
    "put it there before the sweep, and name the folder in clusters.yaml",
)
def _(s: Subject) -> str | None:
    gone = [
        f"{name} ({s.plan.wants[name]})" for name in s.plan.wants if _known(s, name) and not s.node.paths[name].exists
    ]
    return f"not there: {', '.join(gone)}" if gone else None


@rule(
    "checkpoint_incomplete",
    "error",
    "A folder with a config file and without its weights passes for a checkpoint until the server dies.",
    "finish the download",
)
def _(s: Subject) -> str | None:
    cut = {name: facts for name, facts in s.node.paths.items() if facts.shards_missing}
    return (
        ", ".join(f"{name}: {f.shards_missing} of {f.shards_named} shards missing" for name, f in cut.items()) or None
    )


@rule(
    "ports_taken",
    "error",
    "Two jobs on one node answer each other's requests.",
    "free ports on the node, or take it exclusively",
)
def _(s: Subject) -> str | None:
    free, needed = s.node.free_ports, len(ports_of(s.plan))
    return f"{free} free ports, {needed} needed" if free is not None and free < needed else None


@rule(
    "open_files_low",
    "warning",
    "Every session keeps connections open; the server stops accepting at its limit.",
    "raise ulimit -n to 65536",
)
def _(s: Subject) -> str | None:
    limit = s.node.open_files
    low = limit is not None and 0 <= limit < 1024 + 8 * s.row.conc
    return f"{limit} open files for {s.row.conc} sessions" if low else None


@rule(
    "cores_few",
    "warning",
    "Workers, tokenizers, cache servers and client share too few cores, and latency is that of the scheduler of Linux.",
    "ask for more cores (two per GPU and four beside)",
)
def _(s: Subject) -> str | None:
    cores, needed = s.node.cores, 2 * s.row.gpus + 4
    few = cores is not None and gpu_family(s.row.runner) in GPU_MEMORY_GB and cores < needed
    return f"{cores} cores, {needed} needed" if few else None


@rule(
    "scratch_small",
    "warning",
    "The file tier fills the disk before it is of use.",
    "name a folder on a larger disk as the cluster's `scratch`, or ask for fewer sessions",
)
def _(s: Subject) -> str | None:
    free = s.node.scratch_free_bytes
    small = FILE_TIER in s.plan.scratch and free is not None and free < 2 * s.plan.pinned_bytes
    return f"{gib(free or 0)} free below a first tier of {gib(s.plan.pinned_bytes)}" if small else None


def _over(size: int, limit: int | None) -> bool:
    return limit is not None and size > limit


def _known(s: Subject, name: str) -> bool:
    return name in s.node.paths


def _mooncake_configs(s: Subject) -> list[dict[str, Any]]:
    return [json.loads(file.text) for file in s.plan.files if file.path == "mooncake-config"]


# ------------------------------------------------------------------------------------------------------ command line
def table() -> str:
    """Return docs/preflight.md."""
    lines = [
        "# Preflight rules",
        "",
        "Generated by `python -m workflow.preflight --table`; do not edit. An error stops a point before it queues; a",
        "warning is printed beside its result. A fact that is not known makes its rules say nothing.",
        "",
        f"{len(RULES)} rules:",
        "",
        "| code | severity | prevents | what to change |",
        "|---|---|---|---|",
    ]
    lines += [f"| `{one.code}` | {one.severity} | {one.prevents} | {one.do} |" for one in RULES.values()]
    return "\n".join(lines) + "\n"


def check_point(path: Path, runners: Runners | None) -> tuple[str, tuple[PreflightFinding, ...]]:
    """Return a point file's id and findings, with the declared facts of its runner."""
    point = Point.read(path)
    node = declared_facts(point.row.runner, runners) if runners else NodeFacts()
    return point.id, preflight(point, point.plan, node)


def survey(configs: Path, recipes: Path) -> tuple[list[str], Counter[str]]:
    """Return one line for each single-node agentic point of InferenceX's files, and how often each code was found."""
    master, runners = load_inferencex(configs)
    loaded, lines, totals = load_recipes(recipes), [], Counter[str]()
    for planned in single_node_rows(master, runners):
        plan, _ = plan_for(planned, loaded)
        found = check(planned.row, plan, declared_facts(planned.row.runner, runners))
        totals.update(finding.code for finding in found)
        codes = ", ".join(finding.code for finding in found) or "ok"
        lines.append(f"{planned.row.exp_name}\t{planned.row.framework}/{backend_name(planned.row)}\t{codes}")
    return lines, totals


@reports_input_errors
def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return 1 where a point has an error, 2 for a user's mistake."""
    parser = argparse.ArgumentParser(prog="python -m workflow.preflight", description=__doc__)
    parser.add_argument("points", nargs="*", type=Path, help="point files")
    parser.add_argument("--runners", type=Path, help="runners.yaml with the declared facts")
    parser.add_argument("--table", action="store_true", help="print the table of rules")
    parser.add_argument("--all", action="store_true", help="check every single-node agentic point of --configs")
    parser.add_argument("--configs", type=Path, help="folder of *-master.yaml and runners.yaml")
    parser.add_argument("--recipes", type=Path, default=RECIPES)
    options = parser.parse_args(arguments)
    if options.table:
        print(table(), end="")
        return 0
    if options.all == bool(options.points) or (options.all and options.configs is None):
        parser.error("give point files, or --all with --configs, or --table")
    if options.all:
        lines, totals = survey(options.configs, options.recipes)
        listed = ", ".join(f"{count} {code}" for code, count in totals.most_common())
        print("\n".join([*lines, f"{len(lines)} points: {listed or 'no finding'}"]))
        return 1 if any(RULES[code].severity == "error" for code in totals) else 0
    runners = load_runners(options.runners) if options.runners else None
    status = 0
    for path in options.points:
        name, found = check_point(path, runners)
        print("\n".join([f"{name}: {'ok' if not found else f'{len(found)} findings'}", *(f"  {one}" for one in found)]))
        status = 1 if any(one.severity == "error" for one in found) else status
    return status


if __name__ == "__main__":
    sys.exit(main())
