"""TensorRT-LLM's own host cache, called `native` in its search spaces."""

from workflow.serving import Arm, Proof, Situation


class TrtNative:
    """`host_cache_size` is bytes per rank: each worker's cache manager allocates it.

    The original recipes carry constants (200 to 362 GiB) and ignore the budget, so their arms cannot be compared with
    others of the same budget.
    """

    name = "trt-native"
    option_blocks = ()

    def arm(self, situation: Situation) -> Arm:
        """Return the arm: the budget split over the ranks."""
        per_rank = situation.tier_bytes_per_rank
        # The C++ manager prints its secondary pool, the Python one (v2) its arguments; neither was seen here.
        sized = Proof(
            name="host-pool",
            service="engine",
            pattern=rf"KV cache secondary pool: [1-9]|host_cache_size\W{{1,4}}{per_rank}\b",
            expected=True,
            says=f"each rank has a host cache of {per_rank} bytes",
        )
        return Arm(
            backend=self.name,
            engine_config={"kv_cache_config": {"host_cache_size": per_rank}},
            pinned_bytes=per_rank * situation.ranks,
            proofs=(sized,),
        )
