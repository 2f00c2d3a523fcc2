"""vLLM's OffloadingConnector with its CPU tier."""

from workflow.backends.connectors import SIMPLE_SWITCH, created, restored, transfer_config
from workflow.serving import Arm, Emptying, Proof, Situation


class VllmNative:
    """`cpu_bytes_to_use` is for all ranks of one scheduler; under DP attention each rank has a scheduler of its own."""

    name = "vllm-native"
    option_blocks = ()

    def arm(self, situation: Situation) -> Arm:
        """Return the arm; its region may lie in /dev/shm, which preflight compares with the node's."""
        size = situation.tier_bytes // situation.engines
        spec = Proof(
            name="cpu-spec",
            service="engine",
            pattern=r"Creating offloading spec with name: CPUOffloadingSpec\b",
            expected=True,
            says="the connector offloads to host memory",
        )
        return Arm(
            backend=self.name,
            argv=transfer_config("OffloadingConnector", {"cpu_bytes_to_use": size}),
            forbidden_argv=("--no-enable-prefix-caching", "--kv_offloading_size", "--kv-offloading-size"),
            forbidden_env=(SIMPLE_SWITCH,),
            pinned_bytes=size * situation.engines,
            proofs=(created("OffloadingConnector"), spec, restored()),
            empties=Emptying(),
        )
