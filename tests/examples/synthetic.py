"""A sweep whose plans are real and whose numbers are made up: four arms, four concurrencies, two entries, all statuses.

It shows what the small real sweep cannot: storage of two tiers, transfers, preemptions, a point that failed, one that
is invalid, one that is missing, a backend that loses. Everything it makes is called SYNTHETIC.
"""

from pathlib import Path

import numpy as np
import pandas as pd

from workflow.changelog import Entry, LoggedEntry
from workflow.config import Replay
from workflow.definitions import DEFINITIONS, MINIMUM_SAMPLES, PERCENTILES
from workflow.matrix import load_master, load_runners, plan_rows
from workflow.measured import sweep_table
from workflow.plans import plan_for
from workflow.points import Point, TraceIdentity, interleaved, make_point
from workflow.recipes import load_recipes
from workflow.timeline import COLUMNS as TIMELINE_COLUMNS

PROJECT = Path(__file__).parents[2]
CEILING = 0.93
TURNS = 6
SESSIONS = 24
# arm -> (share found on the device at 8 sessions, share of the rest found on the host, GB/s, cost per output token)
ARMS = {
    "none": (0.55, 0.0, np.nan, 1.0),
    "vllm-native": (0.55, 0.75, 46.0, 1.04),
    "lmcache": (0.52, 0.80, 38.0, 1.09),
    "mooncake": (0.50, 0.25, 6.5, 1.22),
}


def points(repeats: int = 2) -> list[Point]:
    """Return the points, in the order to measure them."""
    master = load_master([PROJECT / "tests/examples/synthetic.yaml"])
    runners, recipes = load_runners(PROJECT / "configs/runners.yaml"), load_recipes(PROJECT / "configs/recipes")
    trace = TraceIdentity(name="synthetic-numbers", declaration={"kind": "made up"}, generator=1)
    replay = Replay(client_version="0.13.0", duration_s=900.0)
    found = []
    for index, key in enumerate(("synthetic-before", "synthetic-after")):
        entry = Entry.model_validate(
            {
                "config-keys": (key,),
                "description": (f"SYNTHETIC: {key}",),
                "pr-link": f"https://github.com/offload-sweep/offload-sweep/pull/{index + 2}",
                "scenario-type": ("agentic-coding",),
            }
        )
        for planned in plan_rows((LoggedEntry(index, 1, Path("synthetic.yaml"), entry),), master, runners):
            plan, costs = plan_for(planned, recipes)
            for repeat in range(1, (repeats if index else 1) + 1):
                point = make_point(planned, plan, costs, trace, replay, None, {"aiperf": "synthetic"}, repeat)
                names = {name: f"SYNTHETIC-{getattr(point, name)}" for name in ("group", "curve", "id")}
                found.append(point.model_copy(update=names))
    return interleaved(found)


def sweep(repeats: int = 2) -> tuple[list[Point], pd.DataFrame, dict[str, pd.DataFrame]]:
    """Return (points, the sweep's table, requests of each measured point)."""
    planned = points(repeats)
    table = sweep_table(planned, {}, Path("nowhere"), {})
    requests: dict[str, pd.DataFrame] = {}
    for i, point in enumerate(planned):
        fate = _fate(point)
        table.loc[i, ["status", "reasons"]] = fate
        if fate[0] in ("failed", "missing"):
            continue
        requests[point.id] = _requests(point, i)
        for name, value in (_metrics(point, requests[point.id], i) | _seen(point, i)).items():
            table.loc[i, name] = value
    return planned, table.infer_objects(), requests


def _fate(point: Point) -> tuple[str, str]:
    key = (point.arm, point.concurrency, point.repeat)
    if key[:2] == ("lmcache", 64):
        return "failed", "engine_died"
    if key == ("mooncake", 64, 2):
        return "missing", "not measured yet"
    if key[:2] == ("mooncake", 32):
        return "invalid", "copy_rate_above_bus;hit_share_above_ceiling"
    return "ok", ""


def _shares(point: Point) -> tuple[float, float]:
    device, host, _, _ = ARMS[point.arm]
    device *= (8 / point.concurrency) ** 0.45
    return device, (CEILING - device) * host * (0.8 if point.concurrency > 32 else 1.0)


def _requests(point: Point, seed: int) -> pd.DataFrame:
    rng, shared = np.random.default_rng(1000 + seed), np.random.default_rng(7)
    sessions = np.repeat(np.arange(SESSIONS), TURNS)
    turns = np.tile(np.arange(TURNS), SESSIONS)
    base = np.exp(shared.normal(0, 0.5, SESSIONS))[sessions]
    tokens_in = np.round(24000 * base * (1 + 0.25 * turns))
    tokens_out = np.round(120 + 400 * shared.random(len(sessions)))
    device, host = _shares(point)
    _, _, rate, cost = ARMS[point.arm]
    newer = 0.85 if point.origin.entry else 1.0
    load = point.concurrency / 8
    ttft = tokens_in * (1 - device - host) / 24000 * load**0.8 * newer
    ttft = ttft + (np.nan_to_num(tokens_in * host * 7e4 / 1e9 / rate) if host else 0.0)
    run = np.exp(rng.normal(0, 0.03))
    ttft = (ttft + 0.05) * run * np.exp(rng.normal(0, 0.2, len(ttft)))
    tpot = 0.006 * load**0.35 * cost * newer * np.exp(rng.normal(0, 0.08, len(ttft)))
    e2e = ttft + tpot * (tokens_out - 1)
    start = pd.Series(e2e + 4.0).groupby(sessions).cumsum().to_numpy() - e2e - 4.0 + 5.0 * (sessions % 6)
    return pd.DataFrame(
        {
            "session": [f"{point.id}-{one}" for one in sessions],
            "conversation": [f"made-up-{one:02d}" for one in sessions],
            "turn": turns,
            "agent_depth": 0,
            "start_s": start,
            "ttft_s": ttft,
            "e2e_s": e2e,
            "itl_s": tpot,
            "input_tokens": tokens_in,
            "output_tokens": tokens_out,
            "cached_tokens": np.round(tokens_in * (device + host)),
        }
    )


def _metrics(point: Point, requests: pd.DataFrame, seed: int) -> dict[str, float]:
    device, host = _shares(point)
    _, _, rate, _ = ARMS[point.arm]
    values: dict[str, float] = {"succeeded": float(len(requests)), "definition_version": 1.0}
    data = {"ttft": requests["ttft_s"], "e2e": requests["e2e_s"], "itl": requests["itl_s"], "tpot": requests["itl_s"]}
    for prefix, column in data.items():
        for name, least in MINIMUM_SAMPLES.items():
            found = column.mean() if name == "mean" else np.percentile(column, PERCENTILES[name])
            values[f"{prefix}_{name}_s"] = float(found) if len(column) >= least else np.nan
    for name in MINIMUM_SAMPLES:
        values[f"interactivity_{name}_tok_per_s"] = 1 / values[f"itl_{name}_s"]
    live = (requests["e2e_s"] + 4.0).sum() / point.concurrency
    tokens_in, tokens_out = requests["input_tokens"].sum(), requests["output_tokens"].sum()
    values["input_tokens_mean"] = float(requests["input_tokens"].mean())
    values["input_tok_per_s_per_gpu"] = tokens_in / live / point.gpus
    values["output_tok_per_s_per_gpu"] = tokens_out / live / point.gpus
    values["total_tok_per_s_per_gpu"] = (tokens_in + tokens_out) / live / point.gpus
    values |= {"prompt_share_device": device, "prompt_share_host": host, "prompt_share_computed": 1 - device - host}
    values |= {"cached_share": device + host, "ceiling_share": CEILING, "window_s": 900.0}
    values |= {"achieved_concurrency_mean": 0.8 * point.concurrency * (1 - device - host) + 1, "busy_share": 1.0}
    values |= {
        "device_kv_use_max_share": 1.0,
        "preemptions": float(max(0, point.concurrency - 24) * (4 if host else 9)),
    }
    values["startup_s"] = 92.0 + seed % 5 + (120.0 if host else 0.0)
    if host:
        loaded = tokens_in * host * 7e4
        stored = loaded * 0.4
        real = 71.0 if _fate(point)[0] == "invalid" else rate
        values |= {"transfer_to_device_bytes": loaded, "transfer_to_device_s": loaded / 1e9 / real}
        values |= {"transfer_to_host_bytes": stored, "transfer_to_host_s": stored / 1e9 / (real * 0.9)}
        values |= {"copy_rate_to_device_gb_per_s": real, "copy_rate_to_host_gb_per_s": real * 0.9}
        values |= {"host_kv_use_max_share": 0.97, "host_kv_capacity_bytes": 2.4e12}
    assert values.keys() - {"succeeded", "definition_version"} <= DEFINITIONS.keys()
    return values


def _seen(point: Point, seed: int) -> dict[str, object]:
    version = point.row.image.rpartition(":v")[2]
    return {
        "trace_sha256": "5" * 64,
        "versions": f'{{"vllm": "{version}"}}',
        "node": "synthetic-node",
        "git_revision": "0" * 40,
        "started_unix_s": 1.7961e9 + 1200.0 * seed,
        "bus_limit_gb_per_s": 64.0,
    }


def timeline(point: Point) -> pd.DataFrame:
    """Return a made-up timeline with every column known."""
    rng, count = np.random.default_rng(5), 96
    start = np.arange(-6, count - 6) * 10.0
    filled = np.clip((start + 60) / 300, 0, 1)
    wobble = rng.normal(1, 0.08, count)
    values = {
        "start_s": start,
        "length_s": 10.0,
        "phase": np.select([start < 0, start < 870], ["warm-up", "profiling"], "drain"),
        "in_flight": point.concurrency * 0.7 * wobble,
        "running": np.round(point.concurrency * 0.5 * wobble),
        "waiting": np.round(np.clip(6 * np.sin(start / 90) * wobble, 0, None)),
        "ttft_p50_s": 0.6 * wobble + 0.3 * filled,
        "ttft_max_s": 4 * rng.random(count) + 1.2,
        "output_tok_per_s": 900 * wobble,
        "prompt_tok_per_s": 41000 * wobble,
        "cached_share": np.clip(0.5 + 0.4 * filled, 0, CEILING),
        "device_use_share": np.clip(filled * 1.4, 0, 1),
        "host_use_share": np.clip(filled * 0.97, 0, 1),
        "to_host_gb_per_s": 1.2 * wobble * (1 - 0.6 * filled),
        "to_device_gb_per_s": 3.4 * wobble * filled,
        "preemptions_per_s": np.clip(rng.normal(0.02, 0.05, count), 0, None),
    }
    return pd.DataFrame(values).reindex(columns=list(TIMELINE_COLUMNS))
