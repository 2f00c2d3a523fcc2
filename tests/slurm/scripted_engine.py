"""A server that answers like llama.cpp's, and ends when it is told to. Standard library only."""

import json
import os
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def value(flag: str) -> str:
    """Return the value of a flag."""
    return sys.argv[sys.argv.index(flag) + 1]


class Handler(BaseHTTPRequestHandler):
    """Health, models, one chat completion, metrics, and `/die`."""

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self.answer(b"llamacpp:prompt_tokens_total 100\n", "text/plain")
        elif self.path == "/v1/models":
            self.answer(json.dumps({"data": [{"id": value("--alias")}]}).encode())
        else:
            self.answer(b'{"status": "ok"}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/die":
            print("CUDA error: an illegal memory access was encountered", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        usage = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}
        self.answer(json.dumps({"choices": [{"message": {"content": "ok"}}], "usage": usage}).encode())

    def answer(self, body: bytes, kind: str = "application/json") -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: object) -> None:
        pass


print("serving with xllamacpp 2026.10.11549", flush=True)
if "--cache-ram" in sys.argv:
    print(f"srv: prompt cache is enabled, size limit: {value('--cache-ram')} MiB", flush=True)
    print("srv: found better prompt with f_keep = 0.9", flush=True)
ThreadingHTTPServer(("127.0.0.1", int(value("--port"))), Handler).serve_forever()
