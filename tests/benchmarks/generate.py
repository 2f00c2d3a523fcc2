"""Write client records and a server metrics export of any size, shaped like aiperf's.

python tests/benchmarks/generate.py records FILE COUNT
python tests/benchmarks/generate.py server FILE MEGABYTES
"""

import argparse
import random
import uuid
from itertools import chain, count
from pathlib import Path

import orjson

START_NS = 1_796_000_000_000_000_000
# Metrics that aiperf writes beside the ones that are read: a reader has to get past them.
BALLAST = (
    *("time_to_second_token", "inter_chunk_latency", "time_to_first_output_token", "decode_duration"),
    *("http_req_dns_lookup", "http_req_blocked", "http_req_connecting", "http_req_sending", "http_req_receiving"),
    *("http_req_waiting", "http_req_duration", "http_req_total", "http_req_connection_overhead"),
    *("usage_prompt_tokens", "usage_completion_tokens", "usage_total_tokens", "output_token_count"),
    *("http_req_chunks_sent", "http_req_chunks_received", "http_req_data_sent", "http_req_data_received"),
    *("http_req_connection_reused", "osl_mismatch_diff_pct", "e2e_output_token_throughput"),
    *("prefill_throughput_per_user", "output_token_throughput_per_user", "osl_mismatch_count"),
)


def record(dice: random.Random, index: int, start_ns: int) -> dict[str, object]:
    """Return one record: the first 1 % are warm-up, one profiled request in 200 fails."""
    ttft = dice.lognormvariate(5, 1)
    tokens = dice.randrange(2, 800)
    itl = dice.uniform(5, 30)
    latency = ttft + itl * (tokens - 1)
    session = index // 40
    prompt = dice.randrange(500, 100_000)
    warmup = index < 100
    data: dict[str, object] = {
        "metadata": {
            "session_num": index,
            "x_request_id": str(uuid.UUID(int=dice.getrandbits(128))),
            "x_correlation_id": str(uuid.UUID(int=session)),
            "conversation_id": f"trace_{session % 393:04d}",
            "turn_index": index % 40,
            "source_trace_id": f"trace_{session % 393:04d}",
            "source_outer_idx": index % 40,
            "source_kind": "weka_main",
            "credit_issued_ns": start_ns - 1_000_000,
            "request_start_ns": start_ns,
            "request_ack_ns": start_ns + 2_000_000,
            "request_end_ns": start_ns + round(latency * 1e6),
            "worker_id": "worker_104369ea",
            "record_processor_id": "record_processor_2e8a89b9",
            "benchmark_phase": "warmup" if warmup else "profiling",
            "phase_name": "agentic.warmup" if warmup else "agentic.profiling",
            "phase_kind": "warmup" if warmup else "profiling",
            "was_cancelled": False,
            "context_overflow_skip": False,
            "agent_depth": 0,
            "root_correlation_id": str(uuid.UUID(int=session)),
        },
        "metrics": {
            "time_to_first_token": {"value": ttft, "unit": "ms"},
            "request_latency": {"value": latency, "unit": "ms"},
            "inter_token_latency": {"value": itl, "unit": "ms"},
            "input_sequence_length": {"value": prompt, "unit": "tokens"},
            "output_sequence_length": {"value": tokens, "unit": "tokens"},
            "usage_prompt_cache_read_tokens": {"value": prompt * 3 // 4, "unit": "tokens"},
            **{name: {"value": dice.random() * 100, "unit": "ms"} for name in BALLAST},
        },
    }
    if not warmup and index % 200 == 0:
        data |= {"metrics": {}, "error": {"type": "ServerDisconnectedError", "message": "gone"}}
    return data


def write_records(path: Path, records: int, seed: int = 1) -> None:
    """Write so many records of about 3,000 bytes; the same seed gives the same bytes."""
    dice = random.Random(seed)
    with path.open("wb") as stream:
        for index in range(records):
            stream.write(orjson.dumps(record(dice, index, START_NS + index * 30_000_000)) + b"\n")


def write_server(path: Path, megabytes: int) -> None:
    """Write an export of at least this size: as many series as it takes, each with the slices of an hour."""
    known = ("vllm:prompt_tokens", "vllm:generation_tokens", "vllm:num_preemptions", "vllm:request_success")
    starts = (START_NS + second * 10**9 for second in range(3600))
    slices = orjson.dumps([{"start_ns": start, "end_ns": start + 10**9, "total": 0.0, "rate": 0.0} for start in starts])
    with path.open("wb") as stream:
        stream.write(b'{"schema_version": "1.1", "summary": {}, "metrics": {')
        for number, family in enumerate(chain(known, (f"vllm:other_{i}" for i in count()))):
            if number >= len(known) and stream.tell() >= megabytes * 1_000_000:
                break
            head = f'{", " if number else ""}"{family}": {{"type": "counter", "series": [{{"endpoint_url": "http://a", '
            stream.write(f'{head}"labels": {{"engine": "0"}}, "stats": {{"total": {number + 1}.0}}, '.encode())
            stream.write(b'"timeslices": ' + slices + b"}]}")
        stream.write(b"}}")


def main() -> None:
    """Read the command line and write one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("records", "server"))
    parser.add_argument("file", type=Path)
    parser.add_argument("size", type=int)
    options = parser.parse_args()
    (write_records if options.kind == "records" else write_server)(options.file, options.size)


if __name__ == "__main__":
    main()
