"""LMCache inside vLLM's workers (LMCacheConnectorV1): no server, every rank pins a pool of its own."""

from workflow.backends.connectors import SIMPLE_SWITCH, created, restored, transfer_config
from workflow.engines.launching import version_probe
from workflow.serving import GIB, Arm, Blocker, Proof, Situation


class LmcacheV1:
    """The size is GiB per worker, where the server's is GiB per server and the budget is decimal GB per node."""

    name = "lmcache-v1"
    option_blocks = ()

    def arm(self, situation: Situation) -> Arm:
        """Return the arm; vLLM turns its hybrid cache manager off for it, so linear state cannot be served."""
        per_rank_gib = situation.tier_bytes_per_rank // GIB
        backend = situation.row.kv_offload_backend
        version = backend.version if backend else None
        config = Proof(
            name="pool-size",
            service="engine",
            pattern=rf"Creating LMCacheEngine with config: .*'max_local_cpu_size': {per_rank_gib}(\.0)?\b",
            expected=True,
            says=f"each rank has an LMCache pool of {per_rank_gib} GiB",
        )
        refused = Proof(
            name="connector-supported",
            service="engine",
            pattern=r"No supported cpu connector found",
            expected=False,
            says="LMCache can copy from this device",
        )
        hybrid = Blocker(
            code="lmcache_v1_hybrid",
            says="vLLM turns its hybrid cache manager off for this connector, and a model with linear state needs it",
        )
        return Arm(
            backend=self.name,
            argv=transfer_config("LMCacheConnectorV1", failure_policy="recompute"),
            forbidden_argv=("--no-enable-prefix-caching", "--no-disable-hybrid-kv-cache-manager"),
            env={
                "LMCACHE_CHUNK_SIZE": "256",
                "LMCACHE_LOCAL_CPU": "True",
                "LMCACHE_MAX_LOCAL_CPU_SIZE": str(per_rank_gib),
                # Its counters are exported only where Prometheus has a folder to share between processes.
                "PROMETHEUS_MULTIPROC_DIR": "<path:prometheus>",
            },
            forbidden_env=(SIMPLE_SWITCH, "LMCACHE_CONFIG_FILE"),
            scratch=("prometheus",),
            packages=(f"lmcache=={version}" if version else "lmcache",),
            distributions=("lmcache",),
            blocked_by=(hybrid,) if situation.cache.linear_state else (),
            pinned_bytes=per_rank_gib * GIB * situation.ranks,
            proofs=(created("LMCacheConnectorV1"), config, refused, restored()),
            versions=(version_probe("lmcache", "engine", version),),
            notes=("vLLM runs without its hybrid cache manager",),
        )
