"""LMCache as a library inside ATOM's workers, called `lmcache` in ATOM's search spaces."""

from workflow.contract import Strict
from workflow.engines.launching import version_probe
from workflow.serving import GIB, Arm, Env, Proof, Situation, parse_options


class Options(Strict):
    """What a recipe may set."""

    min_load_tokens: int | None = None
    """Shorter hits are recomputed."""
    state: bool = False
    """Offload recurrent state too; the paged KV alone cannot resume a session of a model with linear attention."""


class AtomLmcache:
    """The size is GiB per rank, and every rank allocates its own.

    The node's budget given to each rank never finishes pinning and hangs the start, or takes TP times the budget.
    """

    name = "atom-lmcache"
    option_blocks = ("lmcache",)

    def arm(self, situation: Situation) -> Arm:
        """Return the arm."""
        options = parse_options(Options, situation, self.name)
        per_rank_gib = situation.tier_bytes_per_rank // GIB
        backend = situation.row.kv_offload_backend
        version = backend.version if backend else None
        env: Env = {
            "LMCACHE_LOCAL_CPU": "True",
            "LMCACHE_MAX_LOCAL_CPU_SIZE": str(per_rank_gib),
            "LMCACHE_CHUNK_SIZE": "256",
        }
        if options.min_load_tokens is not None:
            env["OFFLOAD_MIN_LOAD_TOKENS"] = str(options.min_load_tokens)
        if options.state:
            env |= {
                "OFFLOAD_STATE": "1",
                "OFFLOAD_STATE_STAGING_GROUPS": "8",
                "OFFLOAD_STATE_MIN_LOAD_TOKENS": "0",
                # The default of 2 chunks (8 MiB) holds no state entry (54.78 MiB): the tier declines in one log line
                # and then looks like one that is on and idle.
                "OFFLOAD_GPU_STAGING_CHUNKS": "16",
            }
        created = Proof(
            name="lmcache-created",
            service="engine",
            pattern=rf"Creating LMCacheEngine with config: .*'max_local_cpu_size': {per_rank_gib}(\.0)?\b",
            expected=True,
            says=f"each rank created an LMCache engine of {per_rank_gib} GiB",
        )
        return Arm(
            backend=self.name,
            argv=("--kv-transfer-config", '{"kv_connector": "lmcache_offload", "kv_role": "offload"}'),
            env=env,
            forbidden_env=("LMCACHE_CONFIG_FILE",),
            packages=(f"lmcache=={version}" if version else "lmcache",),
            distributions=("lmcache",),
            pinned_bytes=per_rank_gib * GIB * situation.ranks,
            proofs=(created,),
            versions=(version_probe("lmcache", "engine", version),),
        )
