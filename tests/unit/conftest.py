"""Small artefact folders that tests write, and the real ones that lie beside the checkout."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.archives import unpack

START_S = 1_796_000_000.0
"""Start of the profiling phase in every written folder, Unix seconds: 2026-11-30 00:53:20 UTC."""


class Attempt:
    """An attempt's folder with an aiperf replay of 100 good requests over 100 s; change what a test is about."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.client = folder / "client"
        self.client.mkdir(parents=True)
        self.records: list[Any] = [self.record(at=i, seconds=0.5) for i in range(100)]
        self.summary: dict[str, Any] | None = {
            "schema_version": "1.4",
            "aiperf_version": "0.13.0",
            "was_cancelled": False,
            "is_complete": True,
            "start_time": "2026-11-30T00:53:20",
            "end_time": "2026-11-30T00:55:00",
            "input_config": {"phases": [{"kind": "profiling", "duration": 100.0, "concurrency": 4}]},
            "theoretical_prefix_cache_hit": {"unit": "%", "avg": 90.0, "count": 1000, "sum": 900},
        }
        self.families: dict[str, Any] = {}
        self.phase_s = (0.0, 100.0)

    @staticmethod
    def record(at: float, seconds: float, **change: Any) -> dict[str, Any]:
        """A request sent `at` seconds into the window; keys of `change` are metric names, metadata keys or `error`."""
        start = round((START_S + at) * 1e9)
        values = {
            "time_to_first_token": (seconds * 1e3 / 5, "ms"),
            "request_latency": (seconds * 1e3, "ms"),
            "inter_token_latency": (seconds * 1e3 * 4 / 5 / 9, "ms"),
            "input_sequence_length": (1000, "tokens"),
            "output_sequence_length": (10, "tokens"),
            "usage_prompt_cache_read_tokens": (800, "tokens"),
        }
        data: dict[str, Any] = {
            "metadata": {
                "conversation_id": f"trace_{int(at) % 4}",
                "source_trace_id": f"trace_{int(at) % 4}",
                "root_correlation_id": f"session {int(at) % 4}",
                "turn_index": max(0, int(at) // 4),
                "credit_issued_ns": start - 1_000_000,
                "request_start_ns": start,
                "request_end_ns": start + round(seconds * 1e9),
                "benchmark_phase": "profiling",
                "was_cancelled": False,
            },
            "metrics": {name: {"value": value, "unit": unit} for name, (value, unit) in values.items()},
        }
        for key, value in change.items():
            if key in values:
                if value is None:
                    del data["metrics"][key]
                elif isinstance(value, dict):
                    data["metrics"][key] = value
                else:
                    data["metrics"][key]["value"] = value
            elif key == "error":
                data |= {"error": value, "metrics": {}}
            else:
                data["metadata"][key] = value
        return data

    def counter(self, name: str, total: float, endpoint: str = "http://127.0.0.1:8000/metrics", **labels: str) -> None:
        """Add a counter to the server metrics export."""
        self._family(name, "counter", {"total": total}, endpoint, labels)

    def gauge(self, name: str, low: float, high: float, kind: str | None = "gauge", **labels: str) -> None:
        """Add a gauge, or an untyped family."""
        statistics = {"min": low, "max": high, "avg": (low + high) / 2}
        self._family(name, kind, statistics, "http://127.0.0.1:8000/metrics", labels)

    def _family(self, name: str, kind: str | None, statistics: Any, endpoint: str, labels: dict[str, str]) -> None:
        family = self.families.setdefault(name, {"type": kind, "series": []})
        family["series"].append({"endpoint_url": endpoint, "labels": labels, "stats": statistics})

    def write(self) -> Path:
        """Write the folder and return it."""
        lines = [one if isinstance(one, str) else json.dumps(one) for one in self.records]
        (self.client / "profile_export.jsonl").write_text("\n".join(lines) + "\n")
        if self.summary is not None:
            (self.client / "profile_export_aiperf.json").write_text(json.dumps(self.summary))
        start, end = (round((START_S + at) * 1e9) for at in self.phase_s)
        export = {
            "schema_version": "1.1",
            "summary": {"phase_time_ranges": {"profiling": {"start_ns": start, "end_ns": end}}},
            "metrics": self.families,
        }
        (self.client / "server_metrics_export.json").write_text(json.dumps(export))
        return self.folder


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    """Return a folder that would be judged ok."""
    return Attempt(tmp_path / "attempt")


@pytest.fixture(scope="session")
def artefacts(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that unpacks one archive of real artefacts, once."""
    done: dict[str, Path] = {}

    def unpacked(name: str) -> Path:
        if name not in done:
            done[name] = tmp_path_factory.mktemp(name)
            unpack(shared / "artefacts" / f"{name}.tar.xz", done[name])
        return done[name]

    return unpacked
