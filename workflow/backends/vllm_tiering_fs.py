"""vLLM's OffloadingConnector with a second tier on a file system below its CPU tier."""

import math

from workflow.backends.connectors import SIMPLE_SWITCH, created, restored, transfer_config
from workflow.contract import Strict
from workflow.serving import FILE_TIER, Arm, Emptying, Proof, Situation, parse_options


class Options(Strict):
    """What a recipe may set."""

    read_threads: int = 8
    write_threads: int = 8


class VllmTieringFs:
    """Blocks that fall out of host memory are written to files, and read back on a hit."""

    name = "vllm-tiering-fs"
    option_blocks = ("vllm-tiering-fs",)

    def arm(self, situation: Situation) -> Arm:
        """Return the arm: the budget as first tier, a folder of the attempt as second tier without a limit."""
        options = parse_options(Options, situation, self.name)
        size = situation.tier_bytes // situation.engines
        # A file holds one offloaded block, a whole number of the engine's own: small ones make the disk the limit.
        blocks = math.lcm(*situation.cache.block_tokens) if situation.cache.block_tokens else 256
        tier = {"type": "fs", "root_dir": f"<path:{FILE_TIER}>"}
        threads = {"n_read_threads": options.read_threads, "n_write_threads": options.write_threads}
        extra = {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": size,
            "block_size": blocks * math.ceil(256 / blocks),
            "secondary_tiers": [{**tier, **threads}],
        }
        tiered = Proof(
            name="second-tier",
            service="engine",
            pattern=r"Created TieringOffloadingManager .* and 1 secondary tier",
            expected=True,
            says="a second tier is attached",
        )
        return Arm(
            backend=self.name,
            argv=transfer_config("OffloadingConnector", extra),
            forbidden_argv=("--no-enable-prefix-caching", "--kv_offloading_size", "--kv-offloading-size"),
            forbidden_env=(SIMPLE_SWITCH,),
            scratch=(FILE_TIER,),
            pinned_bytes=size * situation.engines,
            proofs=(created("OffloadingConnector"), tiered, restored()),
            notes=("the file tier has no limit; its bytes are not part of the host memory budget",),
            # vLLM keeps a persistent tier on purpose: it looks for files, so without them the tier is empty.
            empties=Emptying(folders=(FILE_TIER,)),
        )
