"""InferenceX's own aggregate of a replay, for laying old and new results side by side.

Formulas are InferenceX's, quirks included: both kinds of hit rate under one key, a window from the first start to the
last end, accounting in which a failed warm-up counts twice. Our own definitions are in workflow/definitions.py.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from workflow.evidence import Evidence
from workflow.readers.records import Floats, Records
from workflow.readers.series import Series

PERCENTILES = (50, 75, 90, 95)
Json = dict[str, Any]


def aggregate(evidence: Evidence, gpus: int) -> Json:
    """Return request accounting, `request_metrics`, `server_metrics`, `kv_cache_pool_tokens` and warnings.

    Keys that only describe the run (hardware, image, parallelism) are InferenceX's environment variables and are not
    in the artefacts. Numbers are rounded as InferenceX rounds them: to five decimals, whole ones as integers.
    """
    records = evidence.records
    total = records.total - records.unreadable
    profiled = records.succeeded
    series = _known_series(evidence)
    server = _server_metrics(evidence, series)
    result: Json = {
        "num_requests_total": total,
        "num_requests_successful": profiled,
        "request_accounting": {
            "records_total": total,
            "records_profiled": profiled,
            "records_dropped_total": total - profiled,
            "records_warmup_dropped": records.dropped_as_warmup,
            "records_error_dropped": records.dropped_as_error,
            "error_categories": dict(records.error_categories),
        },
        "request_metrics": _request_metrics(evidence, gpus),
        "server_metrics": server,
        "kv_cache_pool_tokens": server["kv_cache"]["gpu_total_tokens"],
    }
    if not series:
        result["warnings"] = ["server_metrics_export.json missing or empty"]
    rounded: Json = _rounded(result)
    return rounded


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        short = round(value, 5)
        return int(short) if short >= 1 and short.is_integer() else short
    return value


# ----------------------------------------------------------------------------------------------- requests
def _distribution(data: Floats) -> Json:
    if data.size == 0:
        return {}
    points = np.percentile(data, PERCENTILES)
    names = [f"p{p}" for p in PERCENTILES]
    return {"mean": float(data.mean()), **dict(zip(names, map(float, points), strict=True)), "std": float(data.std())}


def _inverted(data: Floats) -> Json:
    """1 / each statistic, so that p90 is the slow tail; the deviation is of the inverted values."""
    statistics = _distribution(data)
    inverted = {name: 1 / value for name, value in statistics.items() if name != "std"}
    return {**inverted, "std": float((1 / data).std())} if statistics else {}


def _request_metrics(evidence: Evidence, gpus: int) -> Json:
    records = evidence.records
    values = {name: _usable(records.answered[name]) for name in ("ttft_s", "e2e_s", "itl_s", "full_response_itl_s")}
    tokens = records.answered["output_tokens"]
    both = np.isfinite(records.answered["e2e_s"]) & (records.answered["e2e_s"] > 0) & np.isfinite(tokens) & (tokens > 0)
    itl = _distribution(values["itl_s"])
    ceiling = evidence.summary.share("theoretical_prefix_cache_hit")
    return {
        "qps": _qps(records),
        "latency": {
            "ttft": _distribution(values["ttft_s"]),
            "e2el": _distribution(values["e2e_s"]),
            "itl": itl,
            "tpot": dict(itl),
            "intvty": _inverted(values["itl_s"]),
            "e2e_norm_intvty": _inverted(records.answered["e2e_s"][both] / tokens[both]),
            "full_response_itl": _distribution(values["full_response_itl_s"]),
            "full_response_intvty": _inverted(values["full_response_itl_s"]),
        },
        "tokens": {
            "input": _distribution(_known(records.answered["input_tokens"])),
            "output_actual": _distribution(_known(tokens)),
            # Upstream looks it up in a local copy of the trace corpus; it is left out where there is none.
            "output_expected": {},
        },
        "throughput": _throughput(records, gpus),
        "cache": {"theoretical_cache_hit_rate": None if ceiling is None else ceiling[0]},
    }


def _usable(data: Floats) -> Floats:
    return data[np.isfinite(data) & (data > 0)]


def _known(data: Floats) -> Floats:
    return data[np.isfinite(data)]


def _qps(records: Records) -> Json:
    """Requests ended in each whole second from the first end on; the last, partial second is dropped."""
    if records.succeeded == 0:
        return {}
    ended = records.answered["end_ns"]
    ends = (ended - ended.min()) / 1e9
    whole = int(ends.max())
    if whole < 1:
        span = _span(records)
        return {"window_seconds": 1, "samples": 0, "mean": records.succeeded / span} if span > 0 else {}
    counts = np.bincount(ends.astype(np.int64), minlength=whole + 1)[:whole].astype(np.float64)
    return {"window_seconds": 1, "samples": whole, **_distribution(counts)}


def _span(records: Records) -> float:
    return float(records.answered["end_ns"].max() - records.answered["start_ns"].min()) / 1e9


def _throughput(records: Records, gpus: int) -> Json:
    if records.succeeded == 0:
        return {}
    seconds = _span(records)
    if seconds <= 0:
        return {}
    inputs = float(np.nansum(records.answered["input_tokens"])) / seconds
    outputs = float(np.nansum(records.answered["output_tokens"])) / seconds
    rates = {"input": inputs, "output": outputs, "total": inputs + outputs}
    return {
        **{side: {"tokens_per_second": rate} for side, rate in rates.items()},
        "duration_seconds": seconds,
        "per_gpu": {f"{side}_tput_tps": rate / gpus for side, rate in rates.items()},
    }


# ------------------------------------------------------------------------------------------------- server
def _known_series(evidence: Evidence) -> tuple[Series, ...]:
    """Return the export's series where one of the four adapters knows a family in it, else none."""
    export = evidence.export
    if export is None or _adapter(export.series) == "none":
        return ()
    return export.series


def _adapter(series: Sequence[Series]) -> str:
    names = {one.name for one in series}
    for adapter, prefixes in (
        ("dynamo-vllm", ("dynamo_",)),
        ("atom", ("atom:", "atom_")),
        ("sglang", ("sglang:",)),
        ("vllm", ("vllm:",)),
    ):
        if any(name.startswith(prefixes) for name in names):
            return adapter
    return "none"


class _Export:
    """Upstream's two ways of taking a number from a family."""

    def __init__(self, series: Sequence[Series]) -> None:
        self.by_name: dict[str, list[Series]] = {}
        for one in series:
            self.by_name.setdefault(one.name, []).append(one)

    def matching(self, name: str, labels: Mapping[str, str] | None = None) -> list[Series]:
        found = self.by_name.get(name, [])
        # A family without a type was exported as a gauge, and that is how upstream reads it.
        gauges = [one for one in found if one.kind == "gauge"]
        wanted = (labels or {}).items()
        return [one for one in gauges or found if all(one.labels.get(key) == value for key, value in wanted)]

    def sum(self, name: str, labels: Mapping[str, str] | None = None) -> float | None:
        values = [_first(one.delta, one.high, one.mean) for one in self.matching(name, labels)]
        known = [value for value in values if value is not None]
        return sum(known) if known else None

    def highest(self, *names: str) -> float | None:
        for name in names:
            known = [_first(one.high, one.mean, one.delta) for one in self.matching(name)]
            values = [value for value in known if value is not None]
            if values:
                return max(values)
        return None

    def average(self, name: str) -> float | None:
        values = [one.mean for one in self.matching(name) if one.mean is not None]
        return sum(values) / len(values) if values else None

    def by_label(self, name: str, label: str) -> dict[str, float]:
        totals: dict[str, float] = {}
        for one in self.matching(name):
            value = _first(one.delta, one.high, one.mean)
            if value is not None and label in one.labels:
                totals[one.labels[label]] = totals.get(one.labels[label], 0.0) + value
        return totals


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def _share(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None


def _fraction(value: float | None) -> float | None:
    return value / 100 if value is not None and value > 1.5 else value


def _skeleton() -> Json:
    cache = (
        *("gpu_cache_hit_rate", "cpu_cache_hit_rate", "external_cache_hit_rate", "overall_cache_hit_rate"),
        *("prefix_cache_hits", "prefix_cache_queries", "external_prefix_cache_hits", "external_prefix_cache_queries"),
    )
    dynamo = (
        *("frontend_cache_hit_rate", "router_kv_hit_rate", "router_shared_cache_hit_rate"),
        *("frontend_cached_tokens", "frontend_input_tokens"),
    )
    kv_cache = ("gpu_usage_pct", "gpu_total_tokens", "cpu_usage_pct", "cpu_used_tokens", "cpu_total_tokens")
    directions = ("gpu_to_cpu", "cpu_to_gpu")
    offload = [f"{what}_{way}" for what in ("bytes", "time") for way in directions]
    offload += [f"bandwidth_{way}_bytes_per_second" for way in directions]
    sources = dict.fromkeys(("gpu_cache_hit", "cpu_or_external_cache_hit", "computed"))
    return {
        "present": False,
        "adapter": "none",
        "metric_count": 0,
        "cache": {**dict.fromkeys(cache), "cached_tokens_by_source": {}, **dict.fromkeys(dynamo)},
        "kv_cache": dict.fromkeys(kv_cache),
        "kv_offload": dict.fromkeys(offload),
        "tokens": {
            "prompt_total": None,
            "generation_total": None,
            "requests_completed": 0,
            "prompt_by_source": {**sources, "raw": {}},
        },
        "sources": [],
    }


def _server_metrics(evidence: Evidence, series: Sequence[Series]) -> Json:
    result = _skeleton()
    records = evidence.records
    result["tokens"]["requests_completed"] = records.succeeded
    result["kv_cache"]["gpu_total_tokens"] = _pool_tokens(evidence)
    if series:
        adapter = _adapter(series)
        families = evidence.export.families if evidence.export else 0
        result |= {"present": True, "adapter": adapter, "metric_count": families}
        _ADAPTERS[adapter](result, _Export(series))
    for key, side in (("prompt_total", "input"), ("generation_total", "output")):
        if result["tokens"][key] is None and records.succeeded:
            result["tokens"][key] = float(np.nansum(records.answered[f"{side}_tokens"]))
    return result


def _pool_tokens(evidence: Evidence) -> int | None:
    """Last value per tagged engine process, summed; lines without a tag are added up where no line has one."""
    lines = evidence.log.pool_lines if evidence.log else []
    tagged = {tag: tokens for tag, tokens in lines if tag}
    if tagged:
        return sum(tagged.values())
    return sum(tokens for _, tokens in lines) if lines else None


def _vllm(result: Json, export: _Export) -> None:
    cache = result["cache"]
    for key in ("prefix_cache_hits", "prefix_cache_queries"):
        cache[key] = export.sum(f"vllm:{key}")
        cache[f"external_{key}"] = export.sum(f"vllm:external_{key}")
    gpu = _share(cache["prefix_cache_hits"], cache["prefix_cache_queries"])
    external = _share(cache["external_prefix_cache_hits"], cache["external_prefix_cache_queries"])
    overall = gpu
    raw = export.by_label("vllm:prompt_tokens_by_source", "source")
    if raw:
        local, moved = raw.get("local_cache_hit", 0.0), raw.get("external_kv_transfer", 0.0)
        total = sum(raw.values())
        gpu, external, overall = _share(local, total), _share(moved, total), _share(local + moved, total)
        result["tokens"]["prompt_by_source"] = {
            "gpu_cache_hit": raw.get("local_cache_hit"),
            "cpu_or_external_cache_hit": raw.get("external_kv_transfer"),
            "computed": raw.get("local_compute"),
            "raw": raw,
        }
    cache |= {
        "gpu_cache_hit_rate": gpu,
        "cpu_cache_hit_rate": external,
        "external_cache_hit_rate": external,
        "overall_cache_hit_rate": overall,
    }
    use = export.highest("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
    result["kv_cache"]["gpu_usage_pct"] = _fraction(use)
    result["kv_cache"]["cpu_usage_pct"] = _fraction(export.highest("vllm:cpu_kv_cache_usage_perc"))
    offload = result["kv_offload"]
    for way in ("gpu_to_cpu", "cpu_to_gpu"):
        # The names of old builds; what current builds export is not read, so this stays null for them, as upstream.
        moved_bytes, seconds = export.sum(f"vllm:kv_offload_bytes_{way}"), export.sum(f"vllm:kv_offload_time_{way}")
        offload |= {f"bytes_{way}": moved_bytes, f"time_{way}": seconds}
        offload[f"bandwidth_{way}_bytes_per_second"] = _share(moved_bytes, seconds)
    result["tokens"]["prompt_total"] = export.sum("vllm:prompt_tokens")
    result["tokens"]["generation_total"] = export.sum("vllm:generation_tokens")
    result["sources"] = _sources(export)


def _sources(export: _Export) -> list[Json]:
    rows: dict[str, Json] = {}
    columns = {
        "prompt_tokens": "vllm:prompt_tokens",
        "generation_tokens": "vllm:generation_tokens",
        "hits": "vllm:prefix_cache_hits",
        "queries": "vllm:prefix_cache_queries",
        "use": "vllm:kv_cache_usage_perc",
    }
    for column, name in columns.items():
        for one in export.matching(name):
            role = one.labels.get("dynamo_component") or one.labels.get("component") or "combined"
            parts = [role, one.endpoint]
            parts += [f"{key}={one.labels[key]}" for key in ("worker_id", "dp_rank", "engine") if key in one.labels]
            row = rows.setdefault("|".join(parts), {"role": role})
            value = _first(one.delta, one.high, one.mean)
            if value is not None:
                row[column] = row.get(column, 0.0) + value
    return [
        {
            "id": key,
            "role": row["role"],
            "prompt_tokens": row.get("prompt_tokens"),
            "generation_tokens": row.get("generation_tokens"),
            "prefix_cache_hit_rate": _share(row.get("hits"), row.get("queries")),
            "gpu_kv_cache_usage_pct": _fraction(row.get("use")),
        }
        for key, row in sorted(rows.items())
    ]


def _dynamo(result: Json, export: _Export) -> None:
    _vllm(result, export)
    use = export.highest("dynamo_component_gpu_cache_usage_percent")
    if use is not None:
        result["kv_cache"]["gpu_usage_pct"] = _fraction(use)
    cache = result["cache"]
    cached = export.sum("dynamo_frontend_cached_tokens_sum")
    inputs = export.sum("dynamo_frontend_input_sequence_tokens_sum")
    router = export.average("dynamo_component_router_kv_hit_rate")
    shared = export.average("dynamo_component_router_shared_cache_hit_rate")
    cache |= {
        "frontend_cached_tokens": cached,
        "frontend_input_tokens": inputs,
        "frontend_cache_hit_rate": _share(cached, inputs),
        "router_kv_hit_rate": router,
        "router_shared_cache_hit_rate": shared,
    }
    if cache["overall_cache_hit_rate"] is None:
        # `or`, as upstream: a frontend rate of 0.0 is passed over.
        cache["overall_cache_hit_rate"] = cache["frontend_cache_hit_rate"] or shared
    if inputs is not None:
        result["tokens"]["prompt_total"] = inputs


def _sglang(result: Json, export: _Export) -> None:
    prompt = export.sum("sglang:prompt_tokens")
    raw = export.by_label("sglang:cached_tokens", "cache_source")
    cache, kv_cache, tokens = result["cache"], result["kv_cache"], result["tokens"]
    host = _share(raw.get("host"), prompt)
    cached = sum(raw.values()) if raw else export.sum("sglang:cached_tokens")
    overall = _share(cached, prompt)
    cache |= {
        "gpu_cache_hit_rate": _share(raw.get("device"), prompt),
        "cpu_cache_hit_rate": host,
        "external_cache_hit_rate": host,
        "overall_cache_hit_rate": export.average("sglang:cache_hit_rate") if overall is None else overall,
        "cached_tokens_by_source": raw,
    }
    kv_cache["gpu_usage_pct"] = _fraction(export.highest("sglang:token_usage"))
    total = export.sum("sglang:max_total_num_tokens")
    kv_cache["gpu_total_tokens"] = kv_cache["gpu_total_tokens"] if total is None else total
    kv_cache["cpu_used_tokens"] = export.sum("sglang:hicache_host_used_tokens")
    kv_cache["cpu_total_tokens"] = export.sum("sglang:hicache_host_total_tokens")
    kv_cache["cpu_usage_pct"] = _share(kv_cache["cpu_used_tokens"], kv_cache["cpu_total_tokens"])
    tokens |= {"prompt_total": prompt, "generation_total": export.sum("sglang:generation_tokens")}
    tokens["prompt_by_source"] = {
        "gpu_cache_hit": raw.get("device"),
        "cpu_or_external_cache_hit": raw.get("host"),
        "computed": export.sum("sglang:realtime_tokens", {"mode": "prefill_compute"}),
        "raw": raw,
    }


def _atom(result: Json, export: _Export) -> None:
    def either(name: str) -> float | None:
        return _first(export.sum(f"atom:{name}"), export.sum(f"atom_{name}"))

    full, cached, loaded = (
        either(name) for name in ("prefix_cache_full_tokens", "prefix_cache_cached_tokens", "lmcache_loaded_tokens")
    )
    gpu, external = _share(cached, full), _share(loaded, full)
    result["cache"] |= {
        "gpu_cache_hit_rate": gpu,
        "cpu_cache_hit_rate": external,
        "external_cache_hit_rate": external,
        "overall_cache_hit_rate": gpu,
        "prefix_cache_hits": cached,
        "prefix_cache_queries": full,
    }
    result["kv_cache"]["gpu_usage_pct"] = _fraction(export.highest("atom:kv_cache_usage_ratio"))
    result["tokens"]["prompt_total"] = either("prompt_tokens")
    result["tokens"]["generation_total"] = either("generation_tokens")


_ADAPTERS: Mapping[str, Callable[[Json, _Export], None]] = {
    "vllm": _vllm,
    "dynamo-vllm": _dynamo,
    "sglang": _sglang,
    "atom": _atom,
}
