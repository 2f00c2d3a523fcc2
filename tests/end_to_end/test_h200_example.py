"""The committed example of an H200: its tables come from its raw runs by this checkout, with the README's commands."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from tests.end_to_end.conftest import copy_checkout

EXAMPLE = Path("docs/examples/h200")


def test_the_tables_of_the_example_follow_from_its_runs(project, tmp_path):
    root = copy_checkout(project, tmp_path).root
    unpack, draw = re.findall(r"^(?:tar xJf|snakemake --cores) .*$", (root / EXAMPLE / "README.md").read_text(), re.M)
    subprocess.run(shlex.split(unpack), cwd=root, check=True)
    program, *arguments = shlex.split(draw.removesuffix("figures"))
    tables = ["results/metrics.csv", "results/comparison.csv", "results/explanations.csv", "results/fairness.csv"]
    argv = [str(Path(sys.executable).parent / program), *arguments, *tables]
    done = subprocess.run(argv, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for name in map(Path, tables):
        found, committed = pd.read_csv(root / name), pd.read_csv(project / EXAMPLE / name.name)
        pd.testing.assert_frame_equal(found, committed, rtol=1e-6)
    measured = pd.read_csv(project / EXAMPLE / "metrics.csv").query("status in ('ok', 'invalid')")
    committed = sorted(path.stem for path in (project / EXAMPLE / "runs").glob("*.json"))
    assert committed == sorted(measured["point"])


def test_what_the_readme_of_the_example_says_is_in_its_tables(project):
    metrics = pd.read_csv(project / EXAMPLE / "metrics.csv").query("status == 'ok'")
    shown = ["ttft_p50_s", "ttft_p90_s", "tpot_p50_s", "total_tok_per_s_per_gpu"]
    cells = metrics.groupby(["concurrency", "arm"])[shown].mean()
    repeats = metrics.groupby(["concurrency", "arm"]).size()
    stated = set()
    for line in (project / EXAMPLE / "README.md").read_text().splitlines():
        match = re.match(r"\| (4|8|16) \| ([a-z-]+)([^|]*) \| ([\d.]+) / ([\d.]+) \| ([\d.]+) \| ([\d,]+) \|", line)
        if match is None:
            continue
        versions = {" 0.5.2": "lmcache-0.5.2", " 0.5.2 with a patch": "lmcache-0.5.2+stored.once"}
        cell = (int(match[1]), versions[match[3]] if match[2] == "lmcache" else match[2])
        stated.add(cell)
        said = [float(match[i].replace(",", "")) for i in (4, 5, 6, 7)]
        seen = cells.loc[cell] * [1, 1, 1e3, 1]
        assert said == pytest.approx(list(seen), rel=0.03), line
        assert ("2 repeats" in line) == (repeats[cell] == 2), line
    assert stated == set(cells.index)
