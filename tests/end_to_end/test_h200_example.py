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
    shown = {"ttft_p50_s": 1, "ttft_p90_s": 1, "tpot_p50_s": 1e3, "total_tok_per_s_per_gpu": 1}
    shown |= {"cached_share": 100, "ceiling_share": 100, "power_mean_w": 1}
    cells = metrics.groupby(["concurrency", "arm"])[list(shown)].mean() * pd.Series(shown)
    repeats = metrics.groupby(["concurrency", "arm"]).size()
    stated = set()
    for line in (project / EXAMPLE / "README.md").read_text().splitlines():
        columns = [column.strip() for column in line.strip("|").split("|")]
        if len(columns) != len(shown) or columns[0] not in ("4", "8", "16") or not columns[2][0].isdigit():
            continue
        name = re.sub(r"( 0.3.14, tcp|, 2 repeats)$", "", columns[1])
        arm = name.replace(" with a patch", "+stored.once").replace(" ", "-")
        cell = (int(columns[0]), arm)
        stated.add(cell)
        for text, seen in zip(re.findall(r"[\d,.]+", " ".join(columns[2:])), cells.loc[cell], strict=True):
            said, decimals = text.replace(",", ""), len(text.partition(".")[2])
            assert float(said) == pytest.approx(seen, abs=0.51 * 10**-decimals), (line, text)
        assert columns[1].endswith(", 2 repeats") == (repeats[cell] == 2), line
    assert stated == set(cells.index)
