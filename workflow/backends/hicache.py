"""SGLang's hierarchical cache (HiCache): a host pool below the radix tree, alone or with Mooncake as third level."""

import math
from typing import Literal

from workflow.backends import mooncake
from workflow.contract import Strict
from workflow.serving import GB, GIB, Arm, Env, Proof, Situation, parse_options


class Options(Strict):
    """What a recipe states about HiCache for its model."""

    write_policy: Literal["write_through", "write_through_selective", "write_back"] = "write_through"
    io_backend: Literal["direct", "kernel"] = "direct"
    mem_layout: Literal["page_first_direct", "page_first", "layer_first"] = "page_first_direct"
    page_size: int | None = None
    """Null: the recipe's or SGLang's own."""
    pools: float = 1.0
    """Host memory of all pools of a rank / the value of `--hicache-size`. The flag sizes one pool; models with an
    indexer, Mamba state or a draft model allocate more of them, each in proportion."""
    ratio: float | None = None
    """For a model that rejects `--hicache-size`: host tokens / device tokens."""
    device_pool_gb: float | None = None
    """With `ratio`: device KV of one rank, as measured; without it the pinned memory is not known before the start."""
    skip_warmup: bool = False
    """SGLang's own warm-up of every DP rank can time out after the API is already healthy."""


class HiCache:
    """Sizes are decimal GB per rank and pool."""

    name = "hicache"
    option_blocks = ("hicache",)

    def arm(self, situation: Situation) -> Arm:
        """Return the arm: as large as the budget allows over all ranks and pools, or the model's ratio."""
        options = parse_options(Options, situation, self.name)
        return _arm(self.name, situation, options, situation.tier_bytes)


class MooncakeBelow(Options, mooncake.Options):
    """HiCache's options and Mooncake's."""

    segment_gib: int | None = 40
    """Share of one rank in the third level."""


class HiCacheMooncake:
    """HiCache with a Mooncake store as its third level; called `mooncake` in SGLang's search spaces."""

    name = "hicache-mooncake"
    option_blocks = ("hicache", "mooncake")

    def arm(self, situation: Situation) -> Arm:
        """Return the arm; the third level's segments come out of the same budget."""
        options = parse_options(MooncakeBelow, situation, self.name)
        segment = mooncake.segment_bytes(situation, options)
        third = situation.ranks * segment
        arm = _arm(self.name, situation, options, max(0, situation.tier_bytes - third))
        env: Env = {"SGLANG_HICACHE_MOONCAKE_CONFIG_PATH": "<path:mooncake-config>"}
        config = mooncake.store_config(segment, situation, options, local_hostname="127.0.0.1", local_buffer_size=0)
        mounted = Proof(
            name="segment-mounted",
            service="mooncake-master",
            pattern=r"action=mount_segment",
            expected=True,
            says="a rank lent memory to the store",
        )
        return arm.model_copy(
            update={
                "argv": (
                    *arm.argv,
                    *("--hicache-storage-backend", "mooncake", "--hicache-storage-prefetch-policy", "wait_complete"),
                ),
                "env": {**env, **mooncake.transport_env(situation, options)},
                "files": (config,),
                "packages": mooncake.packages(situation),
                "distributions": (mooncake.DISTRIBUTION,),
                "blocked_by": mooncake.blocked_by(situation),
                "services": (mooncake.master(options),),
                "pinned_bytes": arm.pinned_bytes + third,
                "proofs": (*arm.proofs, mounted),
                "versions": mooncake.versions(situation),
                "notes": (*arm.notes, f"third level: {segment // GIB} GiB per rank in Mooncake"),
            }
        )


def _arm(name: str, situation: Situation, options: Options, tier_bytes: int) -> Arm:
    notes: tuple[str, ...] = ()
    if options.ratio is not None:
        size: tuple[str, ...] = ("--hicache-ratio", f"{options.ratio:g}")
        known = options.device_pool_gb is not None
        pinned = round(options.ratio * (options.device_pool_gb or 0) * GB * situation.ranks) if known else 0
        notes = (f"sized by ratio {options.ratio:g}, not by the budget of {situation.row.total_cpu_dram_gb} GB",)
    else:
        # One GB a rank stays free: pages are aligned upwards.
        per_rank_gb = tier_bytes / GB / situation.ranks - 1
        pool_gb = max(0, math.floor(per_rank_gb / options.pools))
        size = ("--hicache-size", str(pool_gb))
        pinned = round(pool_gb * options.pools * GB * situation.ranks)
    argv = (
        *("--enable-hierarchical-cache", *size),
        *("--hicache-write-policy", options.write_policy),
        *("--hicache-io-backend", options.io_backend),
        *("--hicache-mem-layout", options.mem_layout),
        *(("--page-size", str(options.page_size)) if options.page_size else ()),
        *(("--skip-server-warmup",) if options.skip_warmup else ()),
    )
    allocated = Proof(
        name="host-pool",
        service="engine",
        pattern=r"Allocating [0-9.]+ GB host memory for hierarchical KV cache",
        expected=True,
        says="a host KV pool was allocated",
    )
    # Inside containers a wrong view of the free memory can leave nothing to pin: the server crawls.
    budget = Proof(
        name="pin-budget",
        service="engine",
        pattern=r"Pin budget: 0 tokens",
        expected=False,
        says="the pin budget is not zero",
    )
    return Arm(
        backend=name,
        argv=argv,
        # HiCache extends the radix cache; without it nothing is ever found.
        forbidden_argv=("--disable-radix-cache",),
        pinned_bytes=pinned,
        proofs=(allocated, budget),
        notes=notes,
    )
