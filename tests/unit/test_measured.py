"""What is left of a run that was judged, and how it is found again."""

import pandas as pd
import pytest

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


def test_a_document_says_that_its_tables_are_there(judged, tmp_path):
    (tmp_path / "timelines/p-1.parquet").mkdir(parents=True)
    with pytest.raises(OSError, match="timelines"):
        write_measured(judged, tmp_path)
    assert not (tmp_path / "metrics/p-1.json").exists()
