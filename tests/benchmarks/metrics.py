"""How long measuring takes and how much memory it needs; prints the table of docs/benchmarks-metrics.md.

python tests/benchmarks/metrics.py [--records 100000 300000 1000000] [--server-mb 500 2000]

Each row is a fresh process, the best of three runs (other work on the machine only ever adds), imports not counted;
memory is the highest resident size of the process with its imports, and of its largest child. Files lie in a
temporary folder and each is deleted before the next is written.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

PROJECT = Path(__file__).parents[2]
sys.path.insert(0, str(PROJECT))

from tests.benchmarks.generate import write_records, write_server  # noqa: E402

TIMED = """
import json, resource, sys, time
from pathlib import Path
import orjson
from workflow.metrics import Context, measure
from workflow.readers.server_metrics import read_server_metrics
kind, path = sys.argv[1], Path(sys.argv[2])
start, before = time.perf_counter(), time.process_time()
if kind == "measure":
    measure(path.parent, Context(duration_s=3000.0))
elif kind == "server":
    read_server_metrics(path)
else:
    with path.open("rb") as stream:
        for line in stream:
            orjson.loads(line)
seconds = time.perf_counter() - start
both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
cpu = sum(one.ru_utime + one.ru_stime for one in both) - before
print(json.dumps([seconds, cpu, *(one.ru_maxrss / 1e3 for one in both)]))
"""


def timed(kind: str, path: Path, repeats: int = 3) -> tuple[float, float, float, float]:
    """Return (wall seconds, CPU seconds, MB of the process, MB of its largest child)."""
    rows = []
    for _ in range(repeats):
        command = [sys.executable, "-c", TIMED, kind, str(path)]
        done = subprocess.run(command, cwd=PROJECT, check=True, capture_output=True, text=True)
        rows.append(json.loads(done.stdout))
    best = min(rows)
    return best[0], best[1], max(row[2] for row in rows), max(row[3] for row in rows)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, nargs="*", default=[100_000, 300_000, 1_000_000])
    parser.add_argument("--server-mb", type=int, nargs="*", default=[500, 2_000])
    options = parser.parse_args()
    print(f"Python {platform.python_version()}, {platform.machine()}, 2 cores shared with other work\n")
    print("| what | size | wall s | CPU s | MB, process | MB, child |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile_export.jsonl"
        for count in options.records:
            write_records(path, count)
            repeats = 3 if count <= 300_000 else 1
            _row(f"{count:,} records: orjson alone", path, timed("parse", path, repeats))
            _row(f"{count:,} records: measured", path, timed("measure", path, repeats))
        path.unlink(missing_ok=True)
        for megabytes in options.server_mb:
            export = Path(folder) / "server_metrics_export.json"
            write_server(export, megabytes)
            _row("server metrics export", export, timed("server", export, repeats=1))


def _row(what: str, path: Path, figures: tuple[float, float, float, float]) -> None:
    wall, cpu, own, child = figures
    print(
        f"| {what} | {path.stat().st_size / 1e6:,.0f} MB | {wall:.2f} | {cpu:.2f} | {own:.0f} | {child:.0f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
