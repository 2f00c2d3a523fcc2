"""The plan of a sweep: one row for everything that was asked for, and what is paid for."""

import csv
import io
import shutil

import pytest

from workflow.config import load_config
from workflow.points import bill, plan_tsv
from workflow.sweep import measured, notices, plan_sweep, preflight_tsv, write_plan


@pytest.fixture
def demo(project, monkeypatch):
    monkeypatch.chdir(project)
    return plan_sweep(load_config([project / "configs" / "config.yaml"], {}))


def arms(demo):
    return {point.arm: point for point in demo.points.values()}


def test_the_demo_compares_two_arms_at_two_concurrencies(demo):
    cells = [(point.arm, point.concurrency) for point in demo.points.values()]
    assert sorted(cells) == [("llamacpp-ram", 3), ("llamacpp-ram", 6), ("none", 3), ("none", 6)]
    assert len({point.group for point in demo.points.values()}) == 1
    assert len({point.curve for point in demo.points.values()}) == 2
    assert not demo.findings
    assert not demo.doomed


def test_measured_refused_and_left_out_rows_are_in_the_bill(demo):
    first, second, *_ = demo.points
    rows = list(
        csv.DictReader(io.StringIO(plan_tsv(demo.points.values(), {first}, {second: "why_not"}, ())), delimiter="\t")
    )
    assert [row["state"] for row in rows] == ["measured", "refused", "to measure", "to measure"]
    assert rows[1]["why"] == "why_not"
    text = bill(demo.points.values(), {first}, {second})
    assert text.startswith("4 points, 1 measured already, 1 refused by preflight; to measure: 2 points")


def test_only_published_runs_of_this_plan_are_measured(demo, tmp_path):
    assert measured(demo, tmp_path) == set()
    done, begun, *_ = demo.points
    for name in (f"{done}/run.json", f"{begun}/local-1/run.json", "of-an-earlier-plan/run.json"):
        (tmp_path / "runs" / name).parent.mkdir(parents=True)
        (tmp_path / "runs" / name).touch()
    assert measured(demo, tmp_path) == {done}


def test_the_same_plan_is_not_written_twice(demo, tmp_path):
    write_plan(demo, tmp_path)
    files = sorted(tmp_path.rglob("*.*"))
    before = [file.stat().st_mtime_ns for file in files]
    write_plan(demo, tmp_path)
    assert [file.stat().st_mtime_ns for file in files] == before
    assert len(list((tmp_path / "points").glob("*.json"))) == 4


def test_where_a_point_was_asked_for_is_not_what_it_is(demo, project, tmp_path, monkeypatch):
    shutil.copytree(project / "configs", tmp_path / "configs")
    path = tmp_path / "configs/master/local.yaml"
    path.write_text("# a line more\n" + path.read_text())
    monkeypatch.chdir(tmp_path)
    moved = plan_sweep(load_config([tmp_path / "configs/config.yaml"], {}))
    assert set(moved.points) == set(demo.points)
    assert next(iter(moved.points.values())).origin.line == next(iter(demo.points.values())).origin.line + 1


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("configs/traces.yaml", "seed: 20261201", "seed: 1"),
        ("configs/config.yaml", "duration_s: 30", "duration_s: 31"),
        ("configs/models.yaml", "layers: 2", "layers: 3"),
        ("configs/recipes/tiny-llamacpp.yaml", '"16384"', '"8192"'),
        ("configs/environments/aiperf.txt", "aiohttp==", "aiohttp==0."),
        ("configs/environments/llamacpp.txt", "xllamacpp==2026.10.11549", "xllamacpp==2026.10.1"),
    ],
)
def test_what_a_measurement_depends_on_is_in_its_id(demo, project, tmp_path, monkeypatch, file, old, new):
    shutil.copytree(project / "configs", tmp_path / "configs")
    path = tmp_path / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    monkeypatch.chdir(tmp_path)
    changed = plan_sweep(load_config([tmp_path / "configs/config.yaml"], {}))
    assert not set(changed.points) & set(demo.points)


def test_a_limit_judges_and_does_not_measure_anew(demo, project, monkeypatch):
    monkeypatch.chdir(project)
    changed = plan_sweep(load_config([project / "configs/config.yaml"], {"limits": {"error_share": 0.1}}))
    assert set(changed.points) == set(demo.points)


def test_rows_that_cannot_run_here_are_said(project, shared, tmp_path, monkeypatch):
    monkeypatch.chdir(project)
    log = tmp_path / "log.yaml"
    log.write_text(
        "- config-keys: [tiny-f16-local-llamacpp-agentic, dsr1-fp4-b200-sglang]\n  description: [two keys]\n"
        "  pr-link: https://github.com/a/b/pull/7\n"
    )
    changes = {
        "changelog": {"file": str(log)},
        "masters": ["configs/master/local.yaml", str(shared / "inferencex/configs/nvidia-master.yaml")],
        "runners": "configs/runners.yaml",
    }
    sweep = plan_sweep(load_config([project / "configs/config.yaml"], changes))
    assert len(sweep.points) == 4
    assert len(sweep.not_runnable) > 0
    assert any("not runnable here yet: fixed-seq-len" in line for line in notices(sweep))
    assert preflight_tsv(sweep).startswith("point\tseverity\tcode")
