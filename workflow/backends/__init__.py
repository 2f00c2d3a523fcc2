"""KV-cache offload backends, one file each: what a contender adds to a serve command, forbids, pins and proves.

To add one: write `<name>.py` with an object that fits `Backend`, and name it in `BACKENDS`; see docs/add-a-backend.md.
"""

from collections.abc import Mapping
from typing import Protocol

from workflow.backends.atom_lmcache import AtomLmcache
from workflow.backends.hicache import HiCache, HiCacheMooncake
from workflow.backends.llamacpp_ram import LlamaCppRam
from workflow.backends.lmcache import Lmcache
from workflow.backends.lmcache_v1 import LmcacheV1
from workflow.backends.mooncake import Mooncake
from workflow.backends.none import NoOffload
from workflow.backends.trt_native import TrtNative
from workflow.backends.vllm_native import VllmNative
from workflow.backends.vllm_simple import VllmSimple
from workflow.backends.vllm_tiering_fs import VllmTieringFs
from workflow.serving import Arm, Situation


class Backend(Protocol):
    """What the planner asks of a backend."""

    @property
    def name(self) -> str:
        """Return the contender's name in docs and reports."""
        ...

    @property
    def option_blocks(self) -> tuple[str, ...]:
        """Return which blocks of a recipe's `backends` hold its options; later ones win."""
        ...

    def arm(self, situation: Situation) -> Arm:
        """Return what the backend changes for one row; pure. Raises InputError for options that do not fit."""
        ...


# (framework, kv-offload-backend.name of a search space) -> the contender. One word means different systems under
# different engines: `lmcache` is a server of its own beside vLLM and a library inside ATOM.
BACKENDS: Mapping[tuple[str, str], Backend] = {
    ("llamacpp", "none"): NoOffload(),
    ("llamacpp", "llamacpp-ram"): LlamaCppRam(),
    ("vllm", "none"): NoOffload(),
    ("vllm", "vllm-simple"): VllmSimple(),
    ("vllm", "vllm-native"): VllmNative(),
    ("vllm", "vllm-tiering-fs"): VllmTieringFs(),
    ("vllm", "lmcache"): Lmcache(),
    ("vllm", "lmcache-v1"): LmcacheV1(),
    ("vllm", "mooncake"): Mooncake(),
    ("sglang", "none"): NoOffload(),
    ("sglang", "hicache"): HiCache(),
    ("sglang", "mooncake"): HiCacheMooncake(),
    ("trt", "none"): NoOffload(),
    ("trt", "native"): TrtNative(),
    ("atom", "none"): NoOffload(),
    ("atom", "lmcache"): AtomLmcache(),
}


def combinations() -> dict[str, tuple[str, ...]]:
    """Return engine -> the backend names it has, for messages and docs."""
    engines = dict.fromkeys(engine for engine, _ in BACKENDS)
    return {engine: tuple(name for other, name in BACKENDS if other == engine) for engine in engines}
