"""The benchmark's inputs are what they claim to be, and reading them needs memory for columns only."""

import tracemalloc

import pytest

from tests.benchmarks.generate import write_records, write_server
from workflow.metrics import Context, measure
from workflow.readers.aliases import find
from workflow.readers.records import read_records
from workflow.readers.server_metrics import read_server_metrics
from workflow.timeline import timeline


def peak_bytes(read):
    tracemalloc.start()
    try:
        result = read()
        return result, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_generated_records_are_read_as_they_were_meant(tmp_path):
    write_records(tmp_path / "r.jsonl", 1000)
    found, peak = peak_bytes(lambda: read_records(tmp_path / "r.jsonl", processes=1))
    assert (found.warmup, found.failed, found.succeeded, found.unreadable) == (100, 4, 896, 0)
    assert (tmp_path / "r.jsonl").stat().st_size / 1000 == pytest.approx(2800, rel=0.05)
    # The read buffer of 1 MiB, and under 500 bytes a record where its line has 2,800.
    assert peak < 2**20 + 1000 * 500


def test_ten_times_the_records_need_little_more_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.benchmarks.generate.BALLAST", ())
    for name in ("BLOCK_ROWS", "PART_ROWS"):
        monkeypatch.setattr(f"workflow.readers.columns.{name}", 256)
    peaks = []
    for count in (2_000, 20_000):
        write_records(tmp_path / "profile_export.jsonl", count)
        peaks.append(peak_bytes(lambda: measure(tmp_path, Context(duration_s=30.0)))[1])
    # What is kept of a record is 96 bytes in columns; a step looks at four of them at most.
    assert peaks[1] - peaks[0] < 18_000 * 40


def test_an_export_of_any_size_needs_the_memory_of_its_statistics(tmp_path):
    write_server(tmp_path / "s.json", 40)
    assert (tmp_path / "s.json").stat().st_size > 40_000_000
    scrape, peak = peak_bytes(lambda: read_server_metrics(tmp_path / "s.json"))
    assert find(scrape.series, "generation_tokens").value == 2.0
    assert peak < 6_000_000


def test_an_export_over_time_needs_the_memory_of_one_piece(tmp_path):
    write_records(tmp_path / "profile_export.jsonl", 300)
    write_server(tmp_path / "server_metrics_export.json", 12)
    frame, peak = peak_bytes(lambda: timeline(tmp_path, Context(duration_s=9.0)))
    assert frame["preemptions_per_s"].notna().any()
    # Pieces of a megabyte as Python objects. The whole export as such would be 100 MB.
    assert peak < 12_000_000
