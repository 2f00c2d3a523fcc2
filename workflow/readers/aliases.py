"""One table per quantity: under which names the engines and stores export it, newest name first.

The first name that is present wins, for each endpoint alone, and is never added to its predecessor: vLLM exports old
and new names side by side for a while. A quantity is taken from one component only (the first in the list that has
it), because an engine and its store both count the same bytes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from workflow.readers.series import Series


@dataclass(frozen=True)
class Alias:
    """One name of a quantity."""

    component: str
    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    """Required labels; a value that ends in `*` matches by its beginning."""
    scale: float = 1.0
    """Factor to the quantity's unit."""

    def matches(self, series: Series, kind: str) -> bool:
        """Say whether a series carries this name and these labels."""
        if series.name != self.name or series.kind != kind:
            return False
        for key, wanted in self.labels.items():
            found = series.labels.get(key)
            if found is None or not (found.startswith(wanted[:-1]) if wanted.endswith("*") else found == wanted):
                return False
        return True


@dataclass(frozen=True)
class Quantity:
    """What is asked for: its unit, how its series are put together and its names."""

    unit: str
    kind: Literal["counter", "gauge"]
    aliases: tuple[Alias, ...]
    combine: Literal["sum", "max"] = "sum"


@dataclass(frozen=True)
class Found:
    """A quantity's value and where it came from."""

    value: float
    name: str
    component: str
    reset: bool
    series: int


def _q(
    unit: str, kind: Literal["counter", "gauge"], *aliases: Alias, combine: Literal["sum", "max"] = "sum"
) -> Quantity:
    return Quantity(unit, kind, aliases, combine)


A = Alias
QUANTITIES: Mapping[str, Quantity] = {
    "prompt_tokens": _q(
        "tokens",
        "counter",
        A("vllm", "vllm:prompt_tokens"),
        A("sglang", "sglang:prompt_tokens"),
        A("atom", "atom:prompt_tokens"),
        A("atom", "atom_prompt_tokens"),
        A("dynamo", "dynamo_frontend_input_sequence_tokens_sum"),
    ),
    "generation_tokens": _q(
        "tokens",
        "counter",
        A("vllm", "vllm:generation_tokens"),
        A("sglang", "sglang:generation_tokens"),
        A("atom", "atom:generation_tokens"),
        A("atom", "atom_generation_tokens"),
        A("llamacpp", "llamacpp:tokens_predicted"),
        A("dynamo", "dynamo_frontend_output_sequence_tokens_sum"),
    ),
    "tokens_from_device": _q(
        "tokens",
        "counter",
        A("vllm", "vllm:prompt_tokens_by_source", {"source": "local_cache_hit"}),
        A("sglang", "sglang:cached_tokens", {"cache_source": "device"}),
    ),
    "tokens_from_host": _q(
        "tokens",
        "counter",
        A("vllm", "vllm:prompt_tokens_by_source", {"source": "external_kv_transfer"}),
        A("sglang", "sglang:cached_tokens", {"cache_source": "host"}),
    ),
    "tokens_from_storage": _q("tokens", "counter", A("sglang", "sglang:cached_tokens", {"cache_source": "storage*"})),
    "tokens_computed": _q(
        "tokens",
        "counter",
        A("vllm", "vllm:prompt_tokens_by_source", {"source": "local_compute"}),
        A("sglang", "sglang:realtime_tokens", {"mode": "prefill_compute"}),
        A("llamacpp", "llamacpp:prompt_tokens"),
    ),
    "tokens_cached": _q(
        "tokens",
        "counter",
        A("vllm", "vllm:prompt_tokens_cached"),
        A("sglang", "sglang:cached_tokens"),
        A("atom", "atom:prefix_cache_cached_tokens"),
        A("llamacpp", "llamacpp:prompt_tokens_cached"),
        A("dynamo", "dynamo_frontend_cached_tokens_sum"),
    ),
    "prefix_queries": _q(
        "tokens, each scheduling attempt",
        "counter",
        A("vllm", "vllm:prefix_cache_queries"),
        A("vllm", "vllm:gpu_prefix_cache_queries"),
        A("atom", "atom:prefix_cache_full_tokens"),
    ),
    "prefix_hits": _q(
        "tokens, each scheduling attempt",
        "counter",
        A("vllm", "vllm:prefix_cache_hits"),
        A("vllm", "vllm:gpu_prefix_cache_hits"),
        A("atom", "atom:prefix_cache_cached_tokens"),
    ),
    "external_queries": _q("tokens", "counter", A("vllm", "vllm:external_prefix_cache_queries")),
    "external_hits": _q(
        "tokens",
        "counter",
        A("vllm", "vllm:external_prefix_cache_hits"),
        A("atom", "atom:lmcache_loaded_tokens"),
    ),
    "store_lookup_tokens": _q(
        "tokens",
        "counter",
        A("lmcache-mp", "lmcache_mp_lookup_requested_tokens"),
        A("lmcache", "lmcache:num_lookup_tokens"),
    ),
    "store_hit_tokens": _q(
        "tokens",
        "counter",
        A("lmcache-mp", "lmcache_mp_lookup_hit_tokens"),
        A("lmcache", "lmcache:num_lookup_hits"),
    ),
    "store_lookups": _q(
        "lookups",
        "counter",
        A("lmcache-mp", "lmcache_mp_lookups_requests"),
        A("mooncake", "vllm:mooncake_store_operation", {"operation": "lookup_exists"}),
    ),
    "store_lookup_time": _q(
        "s",
        "counter",
        A("mooncake", "vllm:mooncake_store_operation_time_seconds_sum", {"operation": "lookup_exists"}),
    ),
    "store_early_exits": _q("lookups", "counter", A("lmcache-mp", "lmcache_mp_lookup_early_exit_requests")),
    "bytes_to_host": _q(
        "bytes",
        "counter",
        A("vllm", "vllm:kv_offload_store_bytes"),
        A("vllm", "vllm:kv_offload_total_bytes", {"transfer_type": "GPU_to_CPU"}),
        A("vllm", "vllm:kv_offload_bytes_gpu_to_cpu"),
        A("mooncake", "vllm:mooncake_store_operation_bytes", {"operation": "save_put"}),
    ),
    "bytes_to_device": _q(
        "bytes",
        "counter",
        A("vllm", "vllm:kv_offload_load_bytes"),
        A("vllm", "vllm:kv_offload_total_bytes", {"transfer_type": "CPU_to_GPU"}),
        A("vllm", "vllm:kv_offload_bytes_cpu_to_gpu"),
        A("mooncake", "vllm:mooncake_store_operation_bytes", {"operation": "load_get"}),
        A("mooncake", "mem_cache_hit_bytes"),
    ),
    "time_to_host": _q(
        "s",
        "counter",
        A("vllm", "vllm:kv_offload_store_time"),
        A("vllm", "vllm:kv_offload_total_time", {"transfer_type": "GPU_to_CPU"}),
        A("vllm", "vllm:kv_offload_time_gpu_to_cpu"),
        A("mooncake", "vllm:mooncake_store_operation_time_seconds_sum", {"operation": "save_put"}),
        A("lmcache", "lmcache:time_to_store_sum"),
    ),
    "time_to_device": _q(
        "s",
        "counter",
        A("vllm", "vllm:kv_offload_load_time"),
        A("vllm", "vllm:kv_offload_total_time", {"transfer_type": "CPU_to_GPU"}),
        A("vllm", "vllm:kv_offload_time_cpu_to_gpu"),
        A("mooncake", "vllm:mooncake_store_operation_time_seconds_sum", {"operation": "load_get"}),
        A("lmcache", "lmcache:time_to_retrieve_sum"),
    ),
    "preemptions": _q(
        "requests",
        "counter",
        A("vllm", "vllm:num_preemptions"),
        A("sglang", "sglang:num_retractions"),
        A("atom", "atom:preemptions"),
    ),
    "device_use": _q(
        "fraction",
        "gauge",
        A("vllm", "vllm:kv_cache_usage_perc"),
        A("vllm", "vllm:gpu_cache_usage_perc"),
        A("sglang", "sglang:token_usage"),
        A("atom", "atom:kv_cache_usage_ratio"),
        A("dynamo", "dynamo_component_gpu_cache_usage_percent"),
        combine="max",
    ),
    "host_use": _q(
        "fraction",
        "gauge",
        # vllm:kv_offload_cpu_cache_usage_perc is not here: it is the share pinned by running transfers, not the fill.
        A("vllm", "vllm:simple_cpu_offload_usage_perc"),
        A("vllm", "vllm:cpu_kv_cache_usage_perc"),
        A("lmcache-mp", "lmcache_mp_l1_usage_ratio"),
        combine="max",
    ),
    "host_used_tokens": _q("tokens", "gauge", A("sglang", "sglang:hicache_host_used_tokens")),
    "host_total_tokens": _q("tokens", "gauge", A("sglang", "sglang:hicache_host_total_tokens")),
    "host_used_bytes": _q(
        "bytes",
        "gauge",
        A("lmcache-mp", "lmcache_mp_l1_memory_usage_bytes"),
        A("lmcache", "lmcache:local_cache_usage"),
        A("mooncake", "master_allocated_bytes"),
    ),
    "host_total_bytes": _q("bytes", "gauge", A("mooncake", "master_total_capacity_bytes")),
    "device_total_tokens": _q("tokens", "gauge", A("sglang", "sglang:max_total_num_tokens")),
    "resident_bytes": _q("bytes", "gauge", A("process", "process_resident_memory_bytes")),
    "store_failed_keys": _q("keys", "counter", A("mooncake", "vllm:mooncake_store_operation_failed_keys")),
}


def find(series: Iterable[Series], quantity: str) -> Found | None:
    """Return a quantity from a source's series, or None where no name of it is present.

    Counters are increases summed over engines, ranks and endpoints; gauges are summed or taken at their highest, as
    the quantity says. A series without a value (null) is as good as absent.
    """
    wanted = QUANTITIES[quantity]
    listed = [one for one in series if one.kind == wanted.kind and value_of(one) is not None]
    for component in dict.fromkeys(alias.component for alias in wanted.aliases):
        names = [alias for alias in wanted.aliases if alias.component == component]
        chosen = _newest_by_endpoint(listed, names, wanted.kind)
        if chosen:
            values = [(value_of(one) or 0.0) * alias.scale for alias, one in chosen]
            value = sum(values) if wanted.combine == "sum" else max(values)
            reset = any(one.reset for _, one in chosen)
            return Found(value, chosen[0][0].name, component, reset, len(chosen))
    return None


def fullest(series: Iterable[Series], part: str, whole: str) -> tuple[float, float] | None:
    """Return (part, whole) of the engine or rank where part / whole is highest, or None where no series has both.

    The sum over all of them would be their mean fill, beside engines that export the share of the fullest themselves.
    """
    listed = list(series)
    sizes = _by_place(listed, whole)
    pairs = [(value, sizes[place]) for place, value in _by_place(listed, part).items() if sizes.get(place, 0.0) > 0]
    return max(pairs, key=lambda pair: pair[0] / pair[1], default=None)


def _by_place(series: Sequence[Series], quantity: str) -> dict[tuple[str, str, frozenset[tuple[str, str]]], float]:
    """Return a quantity's values by (component, endpoint, labels)."""
    wanted = QUANTITIES[quantity]
    return {
        (alias.component, one.endpoint, frozenset(one.labels.items())): (value_of(one) or 0.0) * alias.scale
        for alias in reversed(wanted.aliases)
        for one in series
        if alias.matches(one, wanted.kind) and value_of(one) is not None
    }


def value_of(series: Series) -> float | None:
    """Return a counter's increase or a gauge's highest value."""
    return series.delta if series.kind == "counter" else series.high


def _newest_by_endpoint(series: Sequence[Series], names: Sequence[Alias], kind: str) -> list[tuple[Alias, Series]]:
    chosen: list[tuple[Alias, Series]] = []
    for endpoint in dict.fromkeys(one.endpoint for one in series):
        here = [one for one in series if one.endpoint == endpoint]
        for alias in names:
            hits = [(alias, one) for one in here if alias.matches(one, kind)]
            if hits:
                chosen += hits
                break
    return chosen
