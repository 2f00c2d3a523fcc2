"""What is left of a run that was judged, and how it is found again."""

import runpy
from types import SimpleNamespace

import pandas as pd
import pytest

from workflow.contract import InputError
from workflow.evidence import Context, read_evidence
from workflow.measured import Measured, requests_by_point, timeline_files, write_measured
from workflow.metrics import measure_evidence


@pytest.fixture
def judged(attempt):
    folder, context = attempt.write(), Context(point="p-1")
    evidence = read_evidence(folder, context)
    metrics = measure_evidence(evidence, context, folder.name)
    return Measured(metrics, evidence, pd.DataFrame({"t_s": [0.0, 1.0]}))


def test_tables_are_found_by_the_points_status(judged, tmp_path):
    write_measured(judged, tmp_path)
    other = judged._replace(metrics=judged.metrics.model_copy(update={"point": "p-2"}))
    write_measured(other, tmp_path)
    table = pd.DataFrame({"point": ["p-1", "p-2", "p-3", "p-4"], "status": ["ok", "invalid", "failed", "missing"]})
    requests = requests_by_point(table, tmp_path)
    assert {point: len(rows) for point, rows in requests.items()} == {"p-1": judged.evidence.records.succeeded}
    assert [len(pd.read_parquet(path)) for path in timeline_files(table, tmp_path)] == [2, 2]


@pytest.mark.parametrize(
    ("lost", "read"),
    [("metrics/p-1.requests.parquet", requests_by_point), ("timelines/p-1.parquet", timeline_files)],
)
def test_a_lost_table_is_one_message_that_says_how_to_make_it_again(judged, tmp_path, lost, read):
    write_measured(judged, tmp_path)
    table = pd.DataFrame({"point": ["p-1"], "status": ["ok"]})
    assert len(read(table, tmp_path)) == 1
    (tmp_path / lost).unlink()
    with pytest.raises(InputError) as caught:
        read(table, tmp_path)
    assert str(caught.value) == (
        f"{tmp_path / lost}: the file of p-1 is missing; delete {tmp_path}/metrics/p-1.json "
        f"and {tmp_path}/metrics.parquet to judge the point again"
    )


@pytest.mark.parametrize(
    ("script", "lost"),
    [("compare.py", "results/metrics/p-1.requests.parquet"), ("draw_timelines.py", "results/timelines/p-1.parquet")],
)
def test_a_script_that_misses_a_table_ends_with_the_message(project, tmp_path, monkeypatch, script, lost):
    pd.DataFrame({"point": ["p-1"], "status": ["ok"]}).to_parquet(tmp_path / "metrics.parquet")
    job = SimpleNamespace(
        input=SimpleNamespace(table=tmp_path / "metrics.parquet"),
        output=SimpleNamespace(folder=tmp_path / "timelines"),
        threads=1,
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=f"^{lost}: the file of p-1 is missing; delete"):
        runpy.run_path(str(project / "scripts" / script), init_globals={"snakemake": job})


def test_a_document_says_that_its_tables_are_there(judged, tmp_path):
    (tmp_path / "timelines/p-1.parquet").mkdir(parents=True)
    with pytest.raises(OSError, match="timelines"):
        write_measured(judged, tmp_path)
    assert not (tmp_path / "metrics/p-1.json").exists()
