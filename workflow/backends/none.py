"""No offload: the control that every other arm is compared with."""

from workflow.matrix import Row
from workflow.serving import Arm, Proof


class NoOffload:
    """Prefix caching on the device stays on; nothing is kept on the host."""

    name = "none"
    engines = ("llamacpp",)

    def arm(self, row: Row) -> Arm:
        """Return the control's arm, with proof that the engine keeps nothing outside the device."""
        off = Proof(
            name="host-cache-off",
            service="engine",
            pattern=r"prompt cache is disabled",
            expected=True,
            says="the engine reports that its host prompt cache is off",
        )
        restored = Proof(
            name="nothing-restored",
            service="engine",
            pattern=r"found better prompt with f_keep",
            expected=False,
            says="no prompt was restored from a host cache",
        )
        return Arm(backend=self.name, argv=("--cache-ram", "0"), proofs=(off, restored))
