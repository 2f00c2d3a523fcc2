"""vLLM's SimpleCPUOffloadConnector: blocks are copied to pinned host memory of the engine's own workers."""

import math

from workflow.backends.connectors import SIMPLE_SWITCH, created, restored, transfer_config
from workflow.contract import Strict
from workflow.serving import GIB, Arm, Emptying, Proof, Situation, parse_options


class Options(Strict):
    """What a recipe may set."""

    lazy: bool = False
    """Store a block when the device needs its place, and not as soon as it is complete: another system, hence noted."""
    cross_layer_blocks: bool = False
    """One block holds all layers: fewer, larger copies."""


class VllmSimple:
    """Sizes are per rank: `cpu_bytes_to_use` is server-wide and divided by the world size again.

    A per-rank value under the server-wide key gives a tensor-parallel server a fraction 1/TP of its budget.
    """

    name = "vllm-simple"
    option_blocks = ("vllm-simple",)

    def arm(self, situation: Situation) -> Arm:
        """Return the arm: the budget split over the ranks, proven by the size and mode that the connector prints."""
        options = parse_options(Options, situation, self.name)
        per_rank = situation.tier_bytes_per_rank
        extra: dict[str, object] = {
            "cpu_bytes_to_use_per_rank": per_rank,
            # A JSON boolean: the string "false" is true in Python and would select the lazy mode.
            "lazy_offload": options.lazy,
        }
        if options.cross_layer_blocks:
            extra["enable_cross_layers_blocks"] = "true"
        mode = "lazy" if options.lazy else "eager"
        # The line says GB and means GiB (seen in 0.25.1: 68719476736 bytes are printed as 64.00 GB).
        size = f"{math.floor(per_rank / GIB * 100 + 0.5) / 100:.2f}"
        sized = Proof(
            name="tier-size-and-mode",
            service="engine",
            pattern=rf"SimpleCPUOffloadConnector: role=WORKER, per_rank={size} GB, .*mode={mode}\b",
            expected=True,
            says=f"each rank has {size} GiB of host memory, {mode} stores",
        )
        disabled = Proof(
            name="not-disabled",
            service="engine",
            pattern=r"(?i)simple.*offload.*disabled|prefix caching is (disabled|not enabled).*offload",
            expected=False,
            says="offloading was not switched off, as happens with only a warning where prefix caching is off",
        )
        return Arm(
            backend=self.name,
            argv=transfer_config("SimpleCPUOffloadConnector", extra),
            forbidden_argv=("--no-enable-prefix-caching",),
            forbidden_env=(SIMPLE_SWITCH,),
            pinned_bytes=per_rank * situation.ranks,
            proofs=(created("SimpleCPUOffloadConnector"), sized, disabled, restored()),
            notes=(f"stores are {mode}",),
            # Lazy stores leave the probes of the proof out of the tier, which would be called empty unseen.
            empties=None if options.lazy else Emptying(),
        )
