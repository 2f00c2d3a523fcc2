"""A replay client that behaves as behaviour.json of the sweep says for its point; else it leaves aiperf's artefacts.

{"none-c1": {"fail": 2}}        fails that many times, then works
{"none-c1": {"wait": true}}     replays until behaviour.json no longer says so
{"none-c1": {"memory_mb": 900}} takes so much memory and holds it
{"none-c1": {"kill_engine": true}}

What each attempt saw of its allocation goes to seen/<point>.<job>.<pid>.json.
"""

import json
import os
import sys
import time
import urllib.request
from pathlib import Path


def value(flag: str) -> str:
    """Return the value of a flag."""
    return sys.argv[sys.argv.index(flag) + 1]


artefacts = Path(value("--output-artifact-dir"))
point = artefacts.parents[1].name
root = artefacts.parents[4]


def told() -> dict[str, object]:
    """Return what this point is told to do now."""
    rules = json.loads((root / "behaviour.json").read_text())
    return next((rule for key, rule in rules.items() if f"-{key}-" in point), {})


mine = told()
attempts = len([path for path in artefacts.parents[1].iterdir() if path.is_dir()])
begin = time.time()
print("Starting AIPerf System", flush=True)


def saw(end: float) -> None:
    """Write down what this attempt has of the node, and when."""
    job = os.environ.get("SLURM_JOB_ID", "0")
    gpus, partition = os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("SLURM_JOB_PARTITION")
    record = {"point": point, "job": job, "gpus": gpus, "partition": partition, "begin": begin, "end": end}
    (root / "seen").mkdir(exist_ok=True)
    (root / "seen" / f"{point}.{job}.{os.getpid()}.json").write_text(json.dumps(record))


saw(begin)
print("Credit phase start: profiling", flush=True)
if attempts <= mine.get("fail", 0):
    print("aiperf.common.exceptions.ServiceError: the scripted failure", flush=True)
    sys.exit(1)
if mine.get("kill_engine"):
    request = urllib.request.Request(value("--url") + "/die", b"{}")
    try:
        urllib.request.urlopen(request, timeout=5)
    except OSError:
        time.sleep(30)
if "memory_mb" in mine:
    held = bytearray(mine["memory_mb"] * 1_000_000)
    held[::4096] = b"x" * len(held[::4096])
    time.sleep(60)
while told().get("wait"):
    time.sleep(0.2)

records = []
now_ns = time.time_ns()
for number in range(40):
    profiling = number >= 4
    start = now_ns - 2_000_000_000 + number * 45_000_000
    metadata = {
        "session_num": number % 4,
        "x_request_id": f"r{number}",
        "x_correlation_id": f"c{number % 4}",
        "conversation_id": f"generated_{number % 4:04}",
        "turn_index": number // 4,
        "credit_issued_ns": start,
        "request_start_ns": start,
        "request_ack_ns": start + 1_000_000,
        "request_end_ns": start + 40_000_000,
        "worker_id": "worker",
        "record_processor_id": "processor",
        "benchmark_phase": "profiling" if profiling else "warmup",
        "was_cancelled": False,
        "agent_depth": 0,
    }
    numbers = {
        "request_latency": (40.0, "ms"),
        "time_to_first_token": (10.0 + number % 7, "ms"),
        "inter_token_latency": (2.0, "ms"),
        "output_sequence_length": (16, "tokens"),
        "output_token_count": (16, "tokens"),
        "input_sequence_length": (200, "tokens"),
        "usage_prompt_tokens": (200, "tokens"),
        "usage_completion_tokens": (16, "tokens"),
        "usage_prompt_cache_read_tokens": (100, "tokens"),
    }
    metrics = {name: {"value": number, "unit": unit} for name, (number, unit) in numbers.items()}
    records.append(json.dumps({"metadata": metadata, "metrics": metrics}))
artefacts.mkdir(parents=True, exist_ok=True)
(artefacts / "profile_export.jsonl").write_text("\n".join(records) + "\n")
summary = {
    "schema_version": "1.4",
    "aiperf_version": "0.13.0",
    "request_count": {"unit": "requests", "avg": 36.0},
    "benchmark_duration": {"unit": "sec", "avg": 2.0},
    "input_config": {},
    "was_cancelled": False,
    "is_complete": True,
    "error_summary": [],
    "start_time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now_ns / 1e9 - 2)),
    "end_time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now_ns / 1e9)),
}
(artefacts / "profile_export_aiperf.json").write_text(json.dumps(summary))
saw(time.time())
