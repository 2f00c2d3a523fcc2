"""A whole sweep of two arms on the real engine with the real client: what it leaves, and what a second start does."""

import base64
import csv
import json
import os
import shutil
import subprocess
import sys
import time

import pandas as pd
import pytest

from workflow.contract import file_sha256
from workflow.points import Point
from workflow.runs import Run


@pytest.fixture(scope="module")
def table(swept):
    return pd.read_csv(swept.results / "metrics.csv").set_index("arm")


def test_every_promised_file_is_there(swept):
    for name in ("plan.tsv", "metrics.csv", "metrics.parquet", "comparison.csv", "summary.md", "report.html"):
        assert (swept.results / name).stat().st_size > 0, name
    figures = {path.stem for path in swept.results.glob("figures/*.svg")}
    assert {"latency", "prompt_tokens", "throughput_interactivity"} <= figures
    assert figures == {path.stem for path in swept.results.glob("figures/*.png")}
    bill = list(csv.DictReader((swept.results / "plan.tsv").open(), delimiter="\t"))
    assert sorted(row["arm"] for row in bill) == ["llamacpp-ram", "none"]
    assert all(float(row["expected_min"]) > 0 and row["gpus"] == "1" for row in bill)


def test_the_arms_differ_only_by_the_host_cache(swept):
    runs = {Run.read(path).point: Run.read(path) for path in swept.runs()}
    commands = {}
    for path in swept.results.glob("points/*.json"):
        point = Point.read(path)
        argv = list(runs[point.id].services[0].argv)
        argv[argv.index("--port") + 1] = "-"
        commands[point.arm] = argv
    changed = [(a, b) for a, b in zip(commands["none"], commands["llamacpp-ram"], strict=True) if a != b]
    assert changed == [("0", "953")]


def test_offload_is_proven_where_declared_and_only_there(swept):
    for path in swept.runs():
        run = Run.read(path)
        assert not run.findings, run.findings
        assert run.versions == {"xllamacpp": "2026.10.11549"}
    restored = {
        Point.read(swept.results / f"points/{p.parent.name}.json").arm: Run.read(p).proofs for p in swept.runs()
    }
    assert restored["llamacpp-ram"]["prompts-restored"]
    assert not restored["none"]["nothing-restored"]


def test_the_host_cache_raises_the_hit_share(table):
    # The engine's own counting; times depend on the machine and are not compared here.
    assert table.loc["none", "prompt_share_host"] == 0
    assert table.loc["llamacpp-ram", "prompt_share_host"] > 0.2
    assert table.loc["llamacpp-ram", "cached_share"] > table.loc["none", "cached_share"] + 0.2
    assert (table["cached_share"] <= table["ceiling_share"] + 0.05).all()
    shares = table[[f"prompt_share_{tier}" for tier in ("device", "host", "storage", "peer", "computed")]]
    assert shares.fillna(0).sum(axis=1).tolist() == pytest.approx([1.0, 1.0], abs=0.01)


def test_every_request_is_accounted_for(swept, table):
    for path in swept.results.glob("metrics/*.json"):
        accounting = json.loads(path.read_text())["accounting"]
        total = accounting.pop("records_total")
        assert total == sum(accounting.values())
        assert accounting["failed"] == 0
    assert (table["status"] == "ok").all(), table["reasons"].tolist()


def test_artefacts_are_what_was_published(swept):
    for path in swept.runs():
        run = Run.read(path)
        names = {artefact.path for artefact in run.artefacts}
        assert {"engine.log", "client.log", "client/profile_export.jsonl", "metrics/engine.after.prom"} <= names
        for artefact in run.artefacts:
            assert file_sha256(path.parent / run.attempt / artefact.path) == artefact.sha256


def test_a_second_start_does_nothing(swept):
    assert swept.planned() == {}


def test_a_deleted_run_is_measured_again_and_nothing_else(swept):
    victim = swept.runs()[0]
    kept = victim.with_suffix(".kept")
    victim.rename(kept)
    try:
        assert swept.planned()["run_point"] == 1
        text = swept.snakemake("--dry-run").stdout
        assert f"Measure {victim.parent.name}" in text
    finally:
        kept.rename(victim)


def touch(paths):
    later = time.time() + 5
    for path in paths:
        os.utime(path, (later, later))


def test_touching_scripts_rules_modules_and_configs_measures_nothing(swept, tmp_path):
    copy = type(swept)(tmp_path / "copy")
    shutil.copytree(swept.root, copy.root, symlinks=True)
    touched = [
        path
        for folder in ("scripts", "rules", "workflow", "configs", "tests")
        for path in (copy.root / folder).rglob("*")
    ]
    touch([*touched, copy.root / "Snakefile", copy.root / "environment.yml", copy.root / "sweep.yaml"])
    assert "run_point" not in copy.planned()
    assert "trace_set" not in copy.planned()


@pytest.mark.parametrize(
    ("module", "redone"),
    [
        ("figures/curves.py", {"figure", "timelines", "report_page", "all"}),
        ("report.py", {"report_page", "all"}),
        ("comparison.py", {"comparison", "figure", "report_page", "all"}),
        ("verdict.py", {"point_metrics", "metrics", "comparison", "figure", "timelines", "report_page", "all"}),
        ("runs.py", set()),
        ("traces.py", set()),
    ],
)
def test_editing_a_module_redoes_its_stage_and_what_follows(swept, module, redone):
    path = swept.root / "workflow" / module
    text, times = path.read_text(), path.stat()
    path.write_text(text + "\n# edited\n")
    try:
        assert set(swept.planned()) == redone
    finally:
        path.write_text(text)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_a_stale_number_is_found_although_every_rule_was_rewritten(swept, tmp_path):
    # Snakemake forgets what lies behind an ancient input whose own job is due: then it would call stale numbers done.
    copy = type(swept)(tmp_path / "copy")
    shutil.copytree(swept.root, copy.root, symlinks=True)
    for path in (copy.root / "rules").glob("*.smk"):
        path.write_text(path.read_text().replace("python -m", "python  -m"))
    module = copy.root / "workflow" / "comparison.py"
    module.write_text(module.read_text() + "\n# edited\n")
    planned = copy.planned()
    assert planned["comparison"] == 1
    assert planned["figure"] > 1
    assert not {"run_point", "trace_set", "model", "environment"} & set(planned)


def test_a_run_that_was_published_just_before_a_kill_counts(swept, tmp_path):
    copy = type(swept)(tmp_path / "copy")
    shutil.copytree(swept.root, copy.root, symlinks=True)
    # What Snakemake leaves when it is killed between a job's last write and its own note that the job is done.
    folder = copy.root / ".snakemake" / "incomplete"
    folder.mkdir(exist_ok=True)
    for run in copy.runs():
        (folder / base64.urlsafe_b64encode(str(run.relative_to(copy.root)).encode()).decode()).touch()
    assert "run_point" not in copy.planned("--rerun-incomplete")


def test_a_changed_artefact_is_refused(swept, tmp_path):
    copy = type(swept)(tmp_path / "copy")
    shutil.copytree(swept.root, copy.root, symlinks=True)
    run = Run.read(copy.runs()[0])
    records = copy.runs()[0].parent / run.attempt / "client" / "profile_export.jsonl"
    with records.open("a") as stream:
        stream.write("{}\n")
    done = copy.snakemake("--forcerun", f"results/metrics/{run.point}.json", check=False)
    assert done.returncode
    assert "has changed since it was published" in done.stderr


def test_one_point_can_be_measured_by_hand(swept, tmp_path):
    point = next(swept.results.glob("points/*none*.json"))
    argv = [sys.executable, "-m", "workflow.runs", str(point), str(tmp_path / "by-hand")]
    done = subprocess.run(argv, cwd=swept.root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert Run.read(tmp_path / "by-hand" / "run.json").point == point.stem
    assert "replay: profiling" in done.stderr
    assert "s left" in done.stderr


def test_the_report_holds_the_figures(swept):
    swept.snakemake("--report", "report-test.html")
    assert "throughput_interactivity" in (swept.root / "report-test.html").read_text()
