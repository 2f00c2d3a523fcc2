"""No offload: the control that every other arm is compared with."""

from workflow.serving import Arm, Emptying, Proof, Situation

# One line an engine that shows that nothing is kept outside the device: (name, pattern, must it be seen, meaning).
_SIGNS: dict[str, tuple[tuple[str, str, bool, str], ...]] = {
    "llamacpp": (
        ("host-cache-off", r"prompt cache is disabled", True, "the engine reports that its host prompt cache is off"),
        ("nothing-restored", r"found better prompt with f_keep", False, "no prompt was restored from a host cache"),
    ),
    # An image may carry VLLM_USE_SIMPLE_KV_OFFLOAD or a config file that turns a connector on.
    "vllm": (("no-connector", r"Creating v1 connector with name", False, "the engine created no KV connector"),),
    "sglang": (
        ("no-host-pool", r"GB host memory for hierarchical KV cache", False, "the engine allocated no host KV pool"),
    ),
    "trt": (("no-host-pool", r"KV cache secondary pool: [1-9]", False, "the engine allocated no host KV pool"),),
    "atom": (("no-lmcache", r"Creating LMCacheEngine", False, "the engine created no LMCache engine"),),
}


class NoOffload:
    """Prefix caching on the device stays on; nothing is kept on the host."""

    name = "none"
    option_blocks = ()

    def arm(self, situation: Situation) -> Arm:
        """Return the control's arm, with signs that the engine keeps nothing outside the device."""
        framework = situation.row.framework
        proofs = tuple(
            Proof(name=name, service="engine", pattern=pattern, expected=expected, says=says)
            for name, pattern, expected, says in _SIGNS[framework]
        )
        if framework == "llamacpp":
            return Arm(backend=self.name, argv=("--cache-ram", "0"), proofs=proofs, empties=Emptying())
        if framework == "vllm":
            forbidden = ("--kv-transfer-config", "--kv-offloading-size", "--kv_offloading_size")
            return Arm(
                backend=self.name,
                forbidden_argv=forbidden,
                forbidden_env=("VLLM_USE_SIMPLE_KV_OFFLOAD", "LMCACHE_CONFIG_FILE"),
                proofs=proofs,
                empties=Emptying(),
            )
        if framework == "sglang":
            forbidden = ("--enable-hierarchical-cache", "--hicache-size", "--hicache-ratio")
            return Arm(backend=self.name, forbidden_argv=forbidden, proofs=proofs)
        if framework == "trt":
            # Null would leave the size to the release's default.
            return Arm(backend=self.name, engine_config={"kv_cache_config": {"host_cache_size": 0}}, proofs=proofs)
        return Arm(backend=self.name, forbidden_argv=("--kv-transfer-config",), proofs=proofs)
