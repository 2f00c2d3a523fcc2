"""Time what a person waits for: the matrix of one real change, and a plan of 5,000 points.

    python tests/benchmarks/matrix_speed.py FOLDER

FOLDER is one unpacked case of matrix-cases.tar.xz (with base/ and head/). Prints the table of docs/benchmarks.md.
Every figure is the median of 9 runs in a new process each, so that imports count.
"""

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

RUNS = 9
PROJECT = Path(__file__).parents[2]

PARSE = """
import sys, yaml
for path in sys.argv[1:]:
    yaml.load(open(path, "rb"), yaml.CSafeLoader)
"""

PLAN = """
from pathlib import Path
from workflow.changelog import parse_changelog
from workflow.lint import lint
from workflow.matrix import plan_rows
from workflow.searchspace import parse_master, parse_runners

line = "{tp: 8, kv-offloading: dram, kv-offload-backend: {name: lmcache}, conc-list: %s}" % list(range(1, 51))
text = "".join(
    f"k{i}:\\n  image: a/b:1\\n  model: a/b\\n  model-prefix: m\\n  precision: fp4\\n  framework: vllm\\n"
    f"  runner: cluster:x\\n  multinode: false\\n  scenarios:\\n    agentic-coding:\\n    - dram-utilization: 0.8\\n"
    f"      search-space:\\n      - {line}\\n"
    for i in range(100)
)
facts = "labels: {}\\nhardware: {cluster:x: {available-cpu-dram-mib: 3000000, gpus-per-node: 8}}\\n"
log = "- config-keys: ['k*']\\n  description: [x]\\n  pr-link: https://example.org/a/b/pull/1\\n"
master = parse_master([(Path("m"), text.encode())])
runners = parse_runners(Path("r"), facts.encode())
entries = parse_changelog(log.encode(), Path("l"))
rows = plan_rows(entries, master, runners)
assert len(rows) == 5000
lint(entries, master, runners, rows)
"""


def seconds(arguments: list[str]) -> tuple[float, float]:
    """Return the median and the best wall time of a Python process."""
    taken = []
    for _ in range(RUNS):
        started = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, cwd=PROJECT, stdout=subprocess.DEVNULL)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken), min(taken)


def main() -> None:
    """Measure and print."""
    case = Path(sys.argv[1]).resolve()
    head = case / "head"
    files = [str(head / "perf-changelog.yaml"), *map(str, sorted((head / "configs").glob("*.yaml")))]
    change = ["-m", "workflow.matrix", "--base", str(case / "base"), "--head", str(head)]
    measured = {
        f"`workflow.matrix --inferencex`, change {case.name}": [*change, "--inferencex"],
        f"`workflow.matrix`, change {case.name}: rows, events and findings": change,
        "its imports alone": ["-c", "import workflow.matrix"],
        "parsing the four files with PyYAML's C loader, nothing else": ["-c", PARSE, *files],
        "rows and findings of 5,000 points": ["-c", PLAN],
    }
    print("| what | median (s) | best (s) |\n|---|---|---|")
    for name, arguments in measured.items():
        median, best = seconds(arguments)
        print(f"| {name} | {median:.2f} | {best:.2f} |", flush=True)
    print(f"\nPython {sys.version.split()[0]}, {os.cpu_count()} cores, median and best of {RUNS} runs.")


if __name__ == "__main__":
    main()
