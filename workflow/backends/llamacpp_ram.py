"""llama.cpp's host prompt cache: the state of a slot is saved to RAM when another prompt takes the slot."""

from workflow.serving import Arm, Proof, Situation

MIB = 1_048_576


class LlamaCppRam:
    """`--cache-ram` is in MiB while budgets are decimal GB: 1 GB is 953 MiB."""

    name = "llamacpp-ram"
    option_blocks = ()

    def arm(self, situation: Situation) -> Arm:
        """Return the arm: the point's whole budget as prompt cache, proven by its size and by restored prompts."""
        size_mib = situation.tier_bytes // MIB
        on = Proof(
            name="host-cache-on",
            service="engine",
            pattern=rf"prompt cache is enabled, size limit: {size_mib} MiB",
            expected=True,
            says=f"the engine reports a host prompt cache of {size_mib} MiB",
        )
        restored = Proof(
            name="prompts-restored",
            service="engine",
            pattern=r"found better prompt with f_keep",
            expected=True,
            says="prompts were restored from the host cache",
        )
        return Arm(
            backend=self.name,
            argv=("--cache-ram", str(size_mib)),
            pinned_bytes=size_mib * MIB,
            proofs=(on, restored),
        )
