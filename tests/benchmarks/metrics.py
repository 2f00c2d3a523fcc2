"""How long measuring takes and how much memory it needs; prints the table of docs/benchmarks-metrics.md.

python tests/benchmarks/metrics.py [--records 100000 300000 1000000] [--server-mb 500 2000]

Each row is a fresh process with everything that it does, the start of Python and imports too: the median of three runs,
of those above 300,000 records or 500 MB one. Memory is the highest sum of what all processes have resident at one time,
looked at every 10 ms; pages that they share count for each. Files lie in a temporary folder and each is deleted before
the next is written.
"""

import argparse
import contextlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

PROJECT = Path(__file__).parents[2]
sys.path.insert(0, str(PROJECT))

from tests.benchmarks.generate import write_records, write_server  # noqa: E402

STEPS = {
    "imports alone": "from workflow.metrics import Context, measure",
    "orjson alone": """
import orjson
with (folder / "profile_export.jsonl").open("rb") as stream:
    for line in stream:
        orjson.loads(line)
""",
    "measured": """
from workflow.metrics import Context, measure
measure(folder, Context(duration_s=3000.0))
""",
    "measured, table of requests, over time": """
from workflow.evidence import Context, read_evidence
from workflow.measured import measure_evidence, timeline_of_evidence, write_requests
context = Context(duration_s=3000.0)
evidence = read_evidence(folder, context)
measure_evidence(evidence, context, folder.name)
write_requests(evidence, folder / "requests.parquet")
timeline_of_evidence(evidence, folder)
""",
}
USED = """
import resource
both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
print(sum(one.ru_utime + one.ru_stime for one in both), both[0].ru_maxrss / 1e3)
"""


def timed(step: str, folder: Path, repeats: int) -> tuple[float, float, float]:
    """Return the medians of (wall seconds, CPU seconds, MB of all processes)."""
    program = f"import sys\nfrom pathlib import Path\nfolder = Path(sys.argv[1])\n{STEPS[step]}{USED}"
    rows = [_timed([sys.executable, "-c", program, str(folder)]) for _ in range(repeats)]
    wall, cpu, memory = (statistics.median(column) for column in zip(*rows, strict=True))
    return wall, cpu, memory


def _timed(command: list[str]) -> tuple[float, float, float]:
    start, most = time.perf_counter(), 0.0
    with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True) as process:
        root = psutil.Process(process.pid)
        while process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                family = [root, *root.children(recursive=True)]
                most = max(most, sum(one.memory_info().rss for one in family) / 1e6)
            time.sleep(0.01)
        wall = time.perf_counter() - start
        assert process.stdout is not None
        cpu, own = map(float, process.stdout.read().split())
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return wall, cpu, max(most, own)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, nargs="*", default=[100_000, 300_000, 1_000_000])
    parser.add_argument("--server-mb", type=int, nargs="*", default=[500, 2_000])
    options = parser.parse_args()
    print(f"Python {platform.python_version()}, {platform.machine()}, 2 cores shared with other work\n")
    print("| input | what | wall s | CPU s | MB |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        records, export = folder / "profile_export.jsonl", folder / "server_metrics_export.json"
        _row("nothing", "imports alone", timed("imports alone", folder, 3))
        for count in options.records:
            write_records(records, count)
            for step in ("orjson alone", "measured", "measured, table of requests, over time"):
                _row(f"{count:,} records", step, timed(step, folder, 3 if count <= 300_000 else 1), records)
        write_records(records, 300)
        for megabytes in options.server_mb:
            write_server(export, megabytes)
            for step in ("measured", "measured, table of requests, over time"):
                _row("servers' export", step, timed(step, folder, 3 if megabytes <= 500 else 1), export)


def _row(source: str, what: str, figures: tuple[float, float, float], file: Path | None = None) -> None:
    wall, cpu, memory = figures
    size = f", {file.stat().st_size / 1e6:,.0f} MB" if file else ""
    print(f"| {source}{size} | {what} | {wall:.2f} | {cpu:.2f} | {memory:.0f} |", flush=True)


if __name__ == "__main__":
    main()
