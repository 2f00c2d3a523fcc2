"""Mooncake's store, embedded in vLLM's workers: every rank lends a segment, one master keeps the index."""

import json
from typing import Any, Literal

from workflow.backends.connectors import SIMPLE_SWITCH, created, restored, transfer_config
from workflow.contract import Strict
from workflow.engines.launching import version_probe, versioned
from workflow.serving import (
    GIB,
    Arm,
    Blocker,
    ConfigFile,
    Emptying,
    Env,
    Probe,
    Proof,
    Service,
    Situation,
    VersionProbe,
    parse_options,
)

_WHEELS = ("mooncake-transfer-engine-cuda13", "mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda")
MODEL_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
DISTRIBUTION = f"mooncake={','.join(_WHEELS)}"


class Options(Strict):
    """What a recipe may set; shared by the store inside vLLM and by the store below HiCache."""

    protocol: Literal["rdma", "tcp"] | None = None
    """Null: rdma on NVIDIA, else tcp."""
    device: str = ""
    """RDMA devices, comma-separated; empty: all. On rail-isolated nodes two different devices cannot reach each other
    even inside one node, and a fixed one that is down looks like a store that hangs: name one that is ACTIVE."""
    lease_s: int = 60
    """How long a hit stays readable. The default of 5 s is shorter than one large hybrid load."""
    watermark: float = 0.80
    """Eviction starts here: each rank has its own segment, and the fullest one decides."""
    local_buffer_gib: int = 4
    segment_gib: int | None = None
    """Null: what the budget leaves after the buffers."""
    gid_index: int | None = None
    tcp_io_threads: int | None = None
    """Threads that move all blocks over TCP. Null: one."""
    tcp_lanes: int | None = None
    """TCP connections between two processes, at most 16. Null: four."""


class ConnectorOptions(Options):
    """What a recipe may set for the store inside vLLM."""

    async_lookup: bool = False
    """Look up beside the scheduler. Otherwise each step waits until the store has answered for every waiting request:
    53 lookups a request and an eighth of the time where the device was full (0.25.1, one H200)."""
    cross_layer_blocks: bool = False
    """Lay the KV cache out so that a block of all layers is one piece of memory, where model, attention and model
    runner allow it. Otherwise a block is copied layer by layer, in pieces of some 64 KiB."""
    model_runner: Literal["v1", "v2"] | None = None
    """Null: the one that vLLM picks. V2 does not lay out `cross_layer_blocks` for a model whose layers share one kind
    of attention (seen in 0.25.1: a block stays in 32 pieces); V1 does."""
    pinned: bool = False
    """Pin the segment: CUDA copies from and to pinned memory faster."""


class Mooncake:
    """MooncakeStoreConnector with an embedded store."""

    name = "mooncake"
    option_blocks = ("mooncake",)

    def arm(self, situation: Situation) -> Arm:
        """Return the arm: segments and transfer buffers of all ranks together fit the budget."""
        options = parse_options(ConnectorOptions, situation, self.name)
        segment = segment_bytes(situation, options)
        extra = {
            "load_async": True,
            **({"lookup_async": True} if options.async_lookup else {}),
            **({"enable_cross_layers_blocks": True} if options.cross_layer_blocks else {}),
        }
        mounted = Proof(
            name="segment-size",
            service="engine",
            pattern=rf"Mooncake mode=embedded \(global_segment_size={segment}\b",
            expected=True,
            says=f"each rank lends {segment} bytes to the store",
        )
        return Arm(
            backend=self.name,
            argv=transfer_config("MooncakeStoreConnector", extra, failure_policy="recompute"),
            forbidden_argv=("--no-enable-prefix-caching",),
            env={
                "MOONCAKE_CONFIG_PATH": "<path:mooncake-config>",
                "VLLM_MOONCAKE_LOAD_RECV_THREADS": "4",
                **transport_env(situation, options),
                **({"MC_STORE_PIN_MEMORY_MAX_BYTES": str(segment)} if options.pinned else {}),
                **({MODEL_RUNNER: str(int(options.model_runner == "v2"))} if options.model_runner else {}),
            },
            forbidden_env=(SIMPLE_SWITCH,),
            files=(store_config(segment, situation, options),),
            packages=packages(situation),
            distributions=(DISTRIBUTION,),
            blocked_by=blocked_by(situation),
            services=(master(options),),
            pinned_bytes=situation.ranks * (segment + options.local_buffer_gib * GIB),
            proofs=(created("MooncakeStoreConnector"), mounted, restored()),
            versions=versions(situation),
            notes=(f"transport {protocol(situation, options)}",),
            metrics=(("mooncake-metrics", "/metrics"),),
            empties=Emptying(),
        )


def protocol(situation: Situation, options: Options) -> str:
    """Return the transport of the store."""
    return options.protocol or ("rdma" if situation.vendor == "nvidia" else "tcp")


def segment_bytes(situation: Situation, options: Options) -> int:
    """Return what one rank lends. A suffix such as `GB` would be read as GiB, 7.4 % above a decimal budget."""
    if options.segment_gib is not None:
        return options.segment_gib * GIB
    return max(0, situation.tier_bytes_per_rank - options.local_buffer_gib * GIB)


def store_config(segment: int, situation: Situation, options: Options, **more: Any) -> ConfigFile:
    """Return the client's configuration file; sizes are plain bytes."""
    config = {
        "mode": "embedded",
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": "127.0.0.1:<port:mooncake-master>",
        "global_segment_size": segment,
        "local_buffer_size": options.local_buffer_gib * GIB,
        "protocol": protocol(situation, options),
        "device_name": options.device,
        "enable_offload": False,
        **more,
    }
    text = json.dumps(config, indent=1, sort_keys=True) + "\n"
    return ConfigFile(path="mooncake-config", filename="mooncake.json", text=text)


def transport_env(situation: Situation, options: Options) -> Env:
    """Return the variables of the transfer engine."""
    env: Env = {
        "MC_ENABLE_DEST_DEVICE_AFFINITY": "1",
        "MC_SLICE_SIZE": "1048576",
        "MC_WORKERS_PER_CTX": "4",
        # Copies inside one process skip the transfer engine; off by default wherever a transport beside tcp exists.
        "MC_STORE_MEMCPY": "1",
    }
    if situation.vendor == "nvidia":
        env["WITH_NVIDIA_PEERMEM"] = "0"
    if protocol(situation, options) == "tcp":
        env["MC_TCP_BIND_ADDRESS"] = "127.0.0.1"
    if options.tcp_io_threads is not None:
        env["MC_NUM_TCP_IO_THREADS"] = str(options.tcp_io_threads)
    if options.tcp_lanes is not None:
        env["MC_TCP_LANES_PER_PEER"] = str(options.tcp_lanes)
    if options.gid_index is not None:
        env["MC_GID_INDEX"] = str(options.gid_index)
    return env


def master(options: Options) -> Service:
    """Return the master's service. Its admin port answers once it serves; a living process proves nothing."""
    argv = (
        *("mooncake_master", "--port", "<port:mooncake-master>", "--metrics_port", "<port:mooncake-metrics>"),
        *("--default_kv_lease_ttl", str(options.lease_s * 1000)),
        *(f"--eviction_high_watermark_ratio={options.watermark:.2f}", "--eviction_ratio=0.10"),
    )
    return Service(
        name="mooncake-master",
        argv=versioned((DISTRIBUTION,), argv),
        env={},
        environment=None,
        probe=Probe(port="mooncake-metrics", path="/metrics", deadline_s=120.0),
    )


def packages(situation: Situation) -> tuple[str, ...]:
    """Return the wheel that client and master come from; on ROCm it holds no transport for GPU memory."""
    version = _version(situation)
    name = _WHEELS[0] if situation.vendor == "nvidia" else _WHEELS[2]
    return (f"{name}=={version}" if version else name,)


def blocked_by(situation: Situation) -> tuple[Blocker, ...]:
    """Return why the store does not run on AMD GPUs."""
    if situation.vendor != "amd":
        return ()
    says = "Mooncake has no ROCm wheel: the original builds it from source inside the job, or fails over tcp mid-run"
    return (Blocker(code="needs_source_build", says=says),)


def versions(situation: Situation) -> tuple[VersionProbe, ...]:
    """Return how the versions of master and client are read back."""
    version = _version(situation)
    return (
        version_probe("mooncake", "mooncake-master", version),
        version_probe("mooncake", "engine", version),
    )


def _version(situation: Situation) -> str | None:
    backend = situation.row.kv_offload_backend
    return backend.version if backend else None
