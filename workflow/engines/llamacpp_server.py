"""Serve one GGUF model with llama.cpp's HTTP server. Runs in the engine's own environment: xllamacpp and nothing else.

The flags are llama-server's. Log lines carry seconds since the start; the line `log clock starts at` gives the wall
clock of their zero, so that a reader can tell which lines fall into a measurement window.
"""

import argparse
import os
import signal
import tempfile
import threading
import time
from importlib.metadata import version


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--alias", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--ctx-size", type=int, required=True, help="tokens of device KV cache, over all slots")
    parser.add_argument("--parallel", type=int, required=True, help="slots")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--cache-ram", type=int, required=True, help="host prompt cache in MiB, 0 is off")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())

    print(f"log clock starts at {time.time():.3f}", flush=True)
    import xllamacpp  # llama.cpp's log clock starts when its library is loaded

    params = xllamacpp.CommonParams()
    params.model.path = args.model
    params.model_alias = [args.alias]
    params.hostnames = [args.host]
    params.port = args.port
    params.n_ctx = args.ctx_size
    params.n_parallel = args.parallel
    params.cpuparams.n_threads = args.threads
    params.cpuparams_batch.n_threads = args.threads
    params.cache_ram_mib = args.cache_ram
    params.endpoint_metrics = True
    # Without a folder to save slots in, they cannot be erased either. Nothing here ever saves one.
    params.slot_save_path = f"{tempfile.gettempdir()}/"
    params.warmup = False
    params.ui = False
    # 4 is the level at which the server says which prompts it restored from the host cache.
    params.verbosity = 4
    print(f"serving with xllamacpp {version('xllamacpp')}", flush=True)
    server = xllamacpp.Server(params)
    print(f"listening on {server.listening_address}", flush=True)
    while not stop.wait(0.2):
        pass
    # The embedded server has no orderly shutdown from Python: its threads would keep the interpreter alive.
    os._exit(0)


main()
