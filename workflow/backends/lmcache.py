"""LMCache in multi-process mode: a server (or one per rank) owns the pool, vLLM's LMCacheMPConnector talks to it."""

import math
from typing import Literal

from workflow.backends.connectors import SIMPLE_SWITCH, created, restored, transfer_config
from workflow.contract import Strict
from workflow.engines.launching import version_probe, versioned
from workflow.serving import GIB, Arm, Emptying, Env, Probe, Proof, Service, Situation, parse_options

# Without it vLLM's own shim is used, and that falls back in silence to a bundled class without hybrid-cache support.
MODULE = "lmcache.integration.vllm.lmcache_mp_connector"

# The package's command-line module has no __main__ guard: `python -m lmcache.cli.main` ends with 0 and does nothing.
START = "import sys; from lmcache.cli.main import main; sys.exit(main())"


class Options(Strict):
    """What a recipe may set."""

    servers: Literal["node", "rank"] = "node"
    """One server is bound by Python's interpreter lock at scale; one per rank spreads the pool in equal parts."""
    chunk_tokens: int | None = None
    """Null: the smallest common multiple of all KV groups' blocks that is not below 256."""
    l1_share: float | None = None
    """Share of the budget that becomes L1. Null: 0.75 on Blackwell, else 1."""
    l1_init_gib: int = 10
    """The pool grows from here, so that start-up does not pin all of it."""
    read_lease_s: int = 7200
    """How long a hit stays readable between lookup and load. The default of 300 s is shorter than the queue of a
    saturated server: the chunk is there, may not be read, and the run dies or recomputes."""
    message_timeout_s: float = 6000.0
    """Must not exceed the lease."""
    shared_memory: bool = True
    """False keeps L1 in process memory: a pool above /dev/shm falls back to a slow path that crashes."""


class Lmcache:
    """`lmcache server` per node or rank, and the connector."""

    name = "lmcache"
    option_blocks = ("lmcache",)

    def arm(self, situation: Situation) -> Arm:
        """Return the arm, with every derate it forces as a declared, printed choice."""
        options = parse_options(Options, situation, self.name)
        count = situation.ranks if options.servers == "rank" else 1
        share = options.l1_share if options.l1_share is not None else 0.75 if situation.blackwell else 1.0
        # --l1-size-gb is in GiB and per server, the budget is decimal GB and for the node.
        l1_gib = int(situation.tier_bytes * share / count / GIB)
        chunk = options.chunk_tokens or self._chunk(situation)
        backend = situation.row.kv_offload_backend
        version = backend.version if backend else None
        servers = tuple(self._server(f"lmcache-{i}", l1_gib, chunk, situation, options) for i in range(count))
        urls = [f"tcp://127.0.0.1:<port:lmcache-{i}>" for i in range(count)]
        # The connector puts host and port together, so its host needs the scheme that the server's own must not have.
        where: dict[str, object] = (
            {"lmcache.mp.server_urls": ",".join(urls)}
            if count > 1
            else {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": "<port:lmcache-0>"}
        )
        argv = transfer_config(
            "LMCacheMPConnector",
            {**where, "lmcache.mp.mq_timeout": options.message_timeout_s},
            module_path=MODULE,
            # The default, `fail`, frees blocks while a copy into them is in flight: an illegal memory access.
            failure_policy="recompute",
        )
        # The port is a number in the connector's config, and a placeholder can only stand in a string.
        argv = tuple(word.replace('"<port:lmcache-0>"', "<port:lmcache-0>") for word in argv)
        notes = [f"{count} LMCache server{'s' if count > 1 else ''}, chunks of {chunk} tokens"]
        if share != 1:
            notes.append(f"L1 is {share:.0%} of the host memory budget")
        return Arm(
            backend=self.name,
            argv=argv,
            # The server maps vLLM's KV tensors through legacy CUDA IPC handles. Memory of the cumem allocator and of
            # expandable segments has none: register_kv_caches fails with cudaErrorInvalidValue.
            forbidden_argv=(
                "--enable-cumem-allocator",
                "--disable-hybrid-kv-cache-manager",
                "--no-enable-prefix-caching",
            ),
            forbidden_env=(SIMPLE_SWITCH, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "LMCACHE_CONFIG_FILE"),
            # The server's GPU worker takes about 0.8 GiB of each GPU that vLLM does not know of.
            derate={"--gpu-memory-utilization": 0.02},
            packages=(f"lmcache=={version}" if version else "lmcache",),
            distributions=("lmcache",),
            services=servers,
            pinned_bytes=l1_gib * GIB * count,
            proofs=(created("LMCacheMPConnector"), restored(), *_native_ops("engine"), *_native_ops(servers[0].name)),
            versions=(
                version_probe("lmcache", servers[0].name, version),
                version_probe("lmcache", "engine", version),
            ),
            notes=tuple(notes),
            metrics=tuple((f"{server.name}-http", "/metrics") for server in servers),
            empties=Emptying(posts=tuple((f"{server.name}-http", "/cache/clear") for server in servers)),
        )

    def _chunk(self, situation: Situation) -> int:
        """Return the chunk: hybrid models have blocks such as 1536 and 3072, of which 256 is no multiple."""
        blocks = math.lcm(*situation.cache.block_tokens) if situation.cache.block_tokens else 256
        return blocks * math.ceil(256 / blocks)

    def _server(self, name: str, l1_gib: int, chunk: int, situation: Situation, options: Options) -> Service:
        # One GPU worker per client avoids stalls under many asynchronous loads.
        workers = (
            ("--max-workers", "2")
            if options.servers == "rank"
            else ("--max-gpu-workers", "1", "--max-cpu-workers", "8")
        )
        argv = (
            *("python3", "-c", START, "server"),
            *("--host", "127.0.0.1", "--port", f"<port:{name}>"),
            *("--http-host", "127.0.0.1", "--http-port", f"<port:{name}-http>"),
            *("--l1-size-gb", str(l1_gib), "--l1-init-size-gb", str(min(options.l1_init_gib, l1_gib))),
            *("--l1-read-ttl-seconds", str(options.read_lease_s)),
            *("--chunk-size", str(chunk), *workers),
            # IsolatedLRU kills the eviction thread at the first watermark: L1 fills and every store is skipped.
            *("--eviction-policy", "LRU", "--eviction-trigger-watermark", "0.85", "--eviction-ratio", "0.10"),
            # Without a GPU the engine's worker has no handler for what the server would drive, and hangs at its start.
            *("--supported-transfer-mode", "auto" if situation.vendor == "none" else "lmcache_driven"),
            # The default changed between versions; linear state needs groups of its own, others must not have them.
            "--separate-object-groups" if situation.cache.linear_state else "--no-separate-object-groups",
        )
        if not options.shared_memory:
            argv += ("--shm-name", "")
        env: Env = {"PYTHONHASHSEED": "0", "LMCACHE_TRACK_USAGE": "false"}
        return Service(
            name=name,
            argv=versioned(("lmcache",), argv),
            env=env,
            environment=None,
            # Where memory cannot be pinned lazily (ROCm), the whole pool is allocated before the first answer.
            probe=Probe(port=f"{name}-http", path="/healthcheck", deadline_s=1800.0),
        )


def _native_ops(service: str) -> tuple[Proof, ...]:
    """Return the sign of LMCache's Python fallback, in which most stores fail while everything looks healthy."""
    return (
        Proof(
            name=f"native-ops-{service}",
            service=service,
            pattern=r"(?i)compiled extension not found|falling back to (torch|python)",
            expected=False,
            says=f"{service}: LMCache runs its compiled operations",
        ),
    )
