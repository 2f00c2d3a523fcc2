"""Which setting decides how fast Mooncake's store copies KV blocks between a GPU and its host's memory, over tcp.

`ENVIRONMENT/bin/python tests/benchmarks/mooncake_copies.py` in an environment with torch and Mooncake, on a node with a
GPU, prints a table. Each setting runs in processes of its own, since the store reads them once; each copies the same
blocks of 2 MiB, as 32 pieces (a layer each, as vLLM lays its cache out by default) and as one.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MIB = 1 << 20
BLOCK, BLOCKS, SEGMENT = 2 * MIB, 256, 2048 * MIB
LAYOUTS = (32, 1)
"""Pieces of a block."""
THREADS = 4
"""Calls at a time, as many as vLLM's connector makes to load (VLLM_MOONCAKE_LOAD_RECV_THREADS)."""
SETTINGS = {
    "as vLLM starts it": {},
    "copies through the transfer engine": {"MC_STORE_MEMCPY": "0"},
    "the same with 8 I/O threads and 16 lanes": {
        "MC_STORE_MEMCPY": "0",
        "MC_NUM_TCP_IO_THREADS": "8",
        "MC_TCP_LANES_PER_PEER": "16",
    },
    "copies inside the process": {"MC_STORE_MEMCPY": "1"},
    "copies inside the process, pinned": {"MC_STORE_MEMCPY": "1", "MC_STORE_PIN_MEMORY_MAX_BYTES": str(SEGMENT)},
}


def measure(port: int) -> list[tuple[float, float]]:
    """Return GB/s (to the host, to the device) of `BLOCKS` blocks in each layout, in this process."""
    # Here, since the process that prints the table must not hold a GPU.
    import torch  # noqa: PLC0415
    from mooncake.store import MooncakeDistributedStore  # noqa: PLC0415

    store = MooncakeDistributedStore()
    master = f"127.0.0.1:{port}"
    if code := store.setup("127.0.0.1", "P2PHANDSHAKE", SEGMENT, 256 * MIB, "tcp", "", master):
        raise SystemExit(f"the store does not start: {code}")
    memory = torch.randint(0, 255, (BLOCKS * BLOCK,), dtype=torch.uint8, device="cuda")
    expected = memory.clone()
    store.register_buffer(memory.data_ptr(), memory.numel())
    return [copy_blocks(store, memory, expected, pieces) for pieces in LAYOUTS]


def copy_blocks(store: Any, memory: Any, expected: Any, pieces: int) -> tuple[float, float]:
    """Return GB/s of storing the blocks of `memory`, and of loading them; what comes back must be `expected`."""
    import torch  # noqa: PLC0415

    keys = [f"block-{pieces}-{i}" for i in range(BLOCKS)]
    size = BLOCK // pieces
    # A layer's pieces of all blocks lie together, so those of one block lie apart.
    places = [[memory.data_ptr() + (p * BLOCKS + i) * size for p in range(pieces)] for i in range(BLOCKS)]
    sizes = [[size] * pieces for _ in range(BLOCKS)]

    def in_batches(call: str) -> float:
        batches = [slice(i, i + BLOCKS // (2 * THREADS)) for i in range(0, BLOCKS, BLOCKS // (2 * THREADS))]
        with ThreadPoolExecutor(THREADS) as pool:
            start = time.perf_counter()
            codes = list(pool.map(lambda b: getattr(store, call)(keys[b], places[b], sizes[b]), batches))
            took = time.perf_counter() - start
        if failed := [code for some in codes for code in some if code < 0]:
            raise SystemExit(f"{call}: {len(failed)} of {BLOCKS} blocks failed, the first with {failed[0]}")
        return BLOCKS * BLOCK / took / 1e9

    to_host = in_batches("batch_put_from_multi_buffers")
    memory.zero_()
    torch.cuda.synchronize()
    to_device = in_batches("batch_get_into_multi_buffers")
    torch.cuda.synchronize()
    if not torch.equal(memory, expected):
        raise SystemExit("the blocks that came back are not those that were stored")
    return to_host, to_device


def main() -> int:
    """Print the table, or one measurement as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--here", action="store_true", help="measure in this process, as its environment says")
    parser.add_argument("--port", type=int, default=50951, help="of the master")
    parser.add_argument("--limit", type=float, default=40.0, help="seconds that one measurement may take")
    options = parser.parse_args()
    if options.here:
        print("RATES " + json.dumps(measure(options.port)), flush=True)
        # Its threads would keep the process.
        os._exit(0)
    program, port = Path(sys.executable).parent / "mooncake_master", options.port
    argv = [str(program), "--port", str(port), "--metrics_port", str(port + 1)]
    master = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    print("| setting | pieces of a block | GB/s to the host | GB/s to the device |\n|---|---|---|---|", flush=True)
    try:
        time.sleep(2)
        for says, env in SETTINGS.items():
            for pieces, rates in zip(LAYOUTS, in_its_own_process(env, port, options.limit), strict=True):
                print(f"| {says} | {pieces} | {rates} |", flush=True)
    finally:
        master.terminate()
        master.wait()
    return 0


def in_its_own_process(env: dict[str, str], port: int, limit_s: float) -> list[str]:
    """Return the cells of each layout under some settings: two rates, or what went wrong."""
    argv = [sys.executable, __file__, "--here", "--port", str(port)]
    wanted = {**os.environ, "MC_TCP_BIND_ADDRESS": "127.0.0.1", **env}
    try:
        done = subprocess.run(argv, env=wanted, capture_output=True, text=True, check=False, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return [f"not done in {limit_s:.0f} s |"] * len(LAYOUTS)
    for line in done.stdout.splitlines():
        if line.startswith("RATES "):
            return [" | ".join(f"{rate:.1f}" for rate in rates) for rates in json.loads(line.removeprefix("RATES "))]
    # Mooncake's own log goes on after what ended the measurement.
    said = [line for line in done.stderr.splitlines() if line.strip() and not re.match(r"[IWEF]\d{4} ", line)]
    return [(said or ["nothing said"])[-1] + " |"] * len(LAYOUTS)


if __name__ == "__main__":
    sys.exit(main())
