"""A server that breaks on demand. Tests only: it computes nothing, so no number of it is a measurement.

It answers the OpenAI chat API, /health, /v1/models and vLLM's names on /metrics. The first `--good` requests are
answered well; from then on it does what `--then` says.
"""

import argparse
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

arguments = argparse.ArgumentParser()
arguments.add_argument("--port", type=int, required=True)
arguments.add_argument("--name", default="model")
arguments.add_argument("--good", type=int, default=10**9)
arguments.add_argument(
    "--then", default="good", choices=["good", "hang", "fail", "fail-some", "die", "nonsense", "refuse", "vanish"]
)
arguments.add_argument("--load", default="well", choices=["well", "die", "never", "no-token"])
arguments.add_argument("--shm", help="leave a file of this name in /dev/shm")
arguments.add_argument("--fill", help="write 4 kB into this folder with every request")
arguments.add_argument("--child", action="store_true", help="start a child that leaves the group")
arguments.add_argument("--deaf", action="store_true", help="do not react to SIGTERM")
options = arguments.parse_args()

lock = threading.Lock()
state = {"requests": 0, "running": 0, "tokens": 0}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def reply(self, body: bytes, status: int = 200, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path == "/health":
            self.reply(b"ok", 503 if options.load == "never" else 200)
        elif self.path == "/v1/models":
            self.reply(json.dumps({"data": [{"id": options.name}]}).encode())
        else:
            text = (
                f'vllm:num_requests_running{{engine="0"}} {state["running"]}\n'
                f'vllm:generation_tokens_total{{engine="0"}} {state["tokens"]}\n'
            )
            self.reply(text.encode(), kind="text/plain")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with lock:
            state["requests"] += 1
            number = state["requests"]
            state["running"] += 1
        try:
            self.answer(body, number, options.then if number > options.good else "good")
        finally:
            with lock:
                state["running"] -= 1

    def answer(self, body: dict, number: int, how: str) -> None:
        if options.load == "no-token":
            self.reply(json.dumps({"choices": [], "usage": {"completion_tokens": 0}}).encode())
            return
        if how == "hang":
            time.sleep(3600)
        if how == "vanish":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "die":
            print(
                "Traceback (most recent call last):\n  File x\nAssertionError: popleft_n of an empty queue", flush=True
            )
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "refuse":
            self.reply(b'{"error": {"message": "The model `other` does not exist"}}', 404)
            return
        if how == "fail" or (how == "fail-some" and number % 10 < 3):
            self.reply(b'{"error": {"message": "made to fail"}}', 500)
            return
        if options.fill:
            (Path(options.fill) / f"block-{number}").write_bytes(bytes(4_000))
        count = min(8, body.get("max_completion_tokens") or body.get("max_tokens") or 8)
        with lock:
            state["tokens"] += count
        word, logprob = ("wrong", -5.0) if how == "nonsense" else ("right", -0.25)
        # Each prompt has an answer of its own, or nothing would show that one is given to another.
        logprob -= zlib.crc32(json.dumps(body["messages"]).encode()) % 100 / 100
        usage = {"prompt_tokens": 100, "completion_tokens": count, "total_tokens": 100 + count}
        if not body.get("stream"):
            entry = {"token": word, "logprob": logprob, "top_logprobs": [{"logprob": logprob}, {"logprob": -7.0}]}
            message = {"role": "assistant", "content": word * count}
            choice = {
                "index": 0,
                "message": message,
                "logprobs": {"content": [entry] * count},
                "finish_reason": "length",
            }
            usage["prompt_tokens_details"] = {"cached_tokens": 50}
            self.reply(json.dumps({"choices": [choice], "usage": usage}).encode())
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        base = {"id": str(number), "object": "chat.completion.chunk", "created": 0, "model": options.name}
        for _ in range(count):
            chunk = {**base, "choices": [{"index": 0, "delta": {"content": word}, "finish_reason": None}]}
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
            self.wfile.flush()
            time.sleep(0.005)
        last = {**base, "choices": [], "usage": usage}
        self.wfile.write(f"data: {json.dumps(last)}\n\ndata: [DONE]\n\n".encode())
        self.close_connection = True


print("loading", flush=True)
if options.load == "die":
    print("INFO: capturing graphs", flush=True)
    raise RuntimeError("Pin budget: 0 tokens (ratio=0.000)")
if options.deaf:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if options.child:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
if options.shm:
    path = Path("/dev/shm") / options.shm
    path.write_bytes(b"\0" * 65536)
    held = path.open("r+b")
    mapped = mmap.mmap(held.fileno(), 65536)
ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()
