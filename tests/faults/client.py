"""A stand-in for the replay client, for faults that are not the client's. Tests only: no number of it is a measurement.

It sends one request after another and leaves records and a summary as aiperf does, also after SIGINT.
"""

import argparse
import json
import os
import signal
import sys
import time
import urllib.request
from pathlib import Path

arguments = argparse.ArgumentParser()
for name in ("--url", "--model", "--benchmark-duration", "--output-artifact-dir"):
    arguments.add_argument(name, required=True)
options, _ = arguments.parse_known_args()
folder = Path(options.output_artifact_dir)
folder.mkdir(parents=True)
mode = os.environ.get("CLIENT_MODE", "")


def stop(*_: object) -> None:
    raise KeyboardInterrupt


signal.signal(signal.SIGINT, stop)
print("Starting AIPerf System\nCredit phase start: profiling", flush=True)
end, good = time.monotonic() + float(options.benchmark_duration), 0
body = json.dumps({"model": options.model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}).encode()
cancelled = False
with (folder / "profile_export.jsonl").open("w") as records:
    try:
        while time.monotonic() < end:
            record = {"metadata": {"benchmark_phase": "profiling", "request_start_ns": time.time_ns()}, "metrics": {}}
            try:
                request = urllib.request.Request(
                    f"{options.url}/v1/chat/completions", body, {"Content-Type": "application/json"}
                )
                urllib.request.urlopen(request, timeout=600).read()
                good += 1
            except OSError as error:
                if mode == "quit":
                    sys.exit(0)
                record["error"] = {"type": type(error).__name__, "message": str(error)}
            record["metadata"]["request_end_ns"] = time.time_ns()
            records.write(json.dumps(record) + "\n")
            records.flush()
            time.sleep(0.02)
    except KeyboardInterrupt:
        cancelled = True
if mode == "hang":
    time.sleep(3600)
if mode == "tear":
    with (folder / "profile_export.jsonl").open("a") as records:
        records.write('{"metadata": {"benchm')
if mode != "no-summary":
    summary = {"request_count": {"avg": good}, "was_cancelled": cancelled, "is_complete": not cancelled}
    (folder / "profile_export_aiperf.json").write_text(json.dumps(summary))
sys.exit(0)
