"""How long the dry run of a sweep takes: `python tests/benchmarks/dry_run.py FOLDER [POINTS] [RUNS]`.

FOLDER must not exist; it becomes a checkout with the sweep of the Slurm tests, its concurrencies multiplied. With a
Slurm at hand (`eval "$(tests/slurm/cluster.sh start)"`) the time until the first job is submitted is measured too; the
jobs are then cancelled.
"""

import os
import resource
import signal
import statistics
import sys
import time
from pathlib import Path

PROJECT = Path(__file__).parents[2]
sys.path[:0] = [str(PROJECT), str(PROJECT / "tests/slurm")]
from checkouts import QUICK, Checkout  # noqa: E402 - found by the line above

WAYS = (("-n", "--quiet", "--profile", "slurm"), ("-n",))
"""The second prints each job and has the triggers that are Snakemake's own."""


def main() -> None:
    """Print the rows of a table."""
    root, points, runs = Path(sys.argv[1]), int((sys.argv[2:] or ["1000"])[0]), int((sys.argv[3:] or ["3"])[0])
    root.mkdir()
    checkout = Checkout(root)
    wanted = ", ".join(str(number + 1) for number in range(points // 2))
    for arm in ("kv-offloading: none", "{name: llamacpp-ram}"):
        checkout.edit("configs/master.yaml", f"{arm}, conc-list: [1, 2, 3]", f"{arm}, conc-list: [{wanted}]")
    for way in WAYS:
        wall, cpu = [], []
        for _ in range(runs):
            begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
            code, said = checkout.snakemake(*way)
            assert code == 0, said[-2000:]
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            wall.append(time.perf_counter() - begin)
            cpu.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        what = f"`snakemake {' '.join(way)}`, {points:,} points"
        print(f"| {what}, wall | {statistics.median(wall):.1f} | {min(wall):.1f} |")
        print(f"| {what}, processor | {statistics.median(cpu):.1f} | {min(cpu):.1f} |", flush=True)
    if "SLURM_CONF" in os.environ:
        begin = time.perf_counter()
        head = checkout.start("--profile", "slurm", *QUICK, "--jobs", "2")
        while "has been submitted" not in checkout.said and head.poll() is None:
            time.sleep(0.1)
        print(f"| first job of {points:,} submitted, environments prepared | - | {time.perf_counter() - begin:.1f} |")
        head.send_signal(signal.SIGINT)
        head.wait()
        checkout.close()


main()
