import itertools
import json
import math
import os
import signal
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workflow.contract import InputError
from workflow.readers import records as module
from workflow.readers.records import error_category, is_timeout, number, read_records


def write(path, lines):
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def test_X11_every_line_is_in_one_class(attempt, tmp_path):
    lines = [attempt.record(at=i, seconds=1) for i in range(8)]
    lines += [attempt.record(at=i, seconds=1, error={"code": 500}) for i in range(2)]
    lines += [attempt.record(at=1, seconds=1, was_cancelled=True)]
    lines += [attempt.record(at=-9, seconds=1, benchmark_phase="warmup") for _ in range(3)]
    lines += [attempt.record(at=-9, seconds=1, benchmark_phase="warmup", error="boom: z")]
    lines += ['{"metadata": {"request_st\n', "[1, 2]\n", "\n"]
    found = read_records(write(tmp_path / "r.jsonl", lines))
    classes = (found.succeeded, found.failed, found.cancelled, found.warmup, found.warmup_failed, found.unreadable)
    assert classes == (8, 2, 1, 3, 1, 2)
    assert found.total == 17


def test_G17_a_failed_warmup_counts_once_here_and_twice_in_inferencex_buckets(attempt, tmp_path):
    lines = [attempt.record(at=0, seconds=1, benchmark_phase="warmup", error="boom: z")]
    found = read_records(write(tmp_path / "r.jsonl", lines))
    assert (found.total, found.warmup, found.warmup_failed, found.failed) == (1, 0, 1, 0)
    assert (found.dropped_as_warmup, found.dropped_as_error) == (1, 1)


def test_G8_a_line_that_is_cut_off_costs_that_line_only(attempt, tmp_path):
    text = json.dumps(attempt.record(at=0, seconds=1)) + "\n" + json.dumps(attempt.record(at=1, seconds=1))[:-20]
    found = read_records(write(tmp_path / "r.jsonl", [text]))
    assert (found.succeeded, found.unreadable) == (1, 1)


def test_G7_bare_nan_is_null_not_an_unreadable_line(attempt, tmp_path):
    line = json.dumps(attempt.record(at=0, seconds=1, inter_token_latency=math.nan)) + "\n"
    assert "NaN" in line
    found = read_records(write(tmp_path / "r.jsonl", [line]))
    assert found.succeeded == 1
    assert math.isnan(found.answered["itl_s"][0])
    assert found.answered["ttft_s"][0] == pytest.approx(0.2)


@pytest.mark.parametrize(("value", "unit"), [(250.0, "ms"), (0.25, "s"), (250e6, "ns"), (250_000, "us")])
def test_P11_the_unit_in_the_file_wins(attempt, tmp_path, value, unit):
    line = attempt.record(at=0, seconds=1, time_to_first_token={"value": value, "unit": unit})
    assert read_records(write(tmp_path / "r.jsonl", [line])).answered["ttft_s"][0] == pytest.approx(0.25)


def test_an_unknown_unit_is_not_guessed(attempt, tmp_path):
    line = attempt.record(at=0, seconds=1, time_to_first_token={"value": 3, "unit": "jiffies"})
    assert read_records(write(tmp_path / "r.jsonl", [line])).unreadable == 1


@pytest.mark.parametrize(
    "change",
    [{"turn_index": 2**40}, {"request_end_ns": 2**70}, {"request_end_ns": 2**70, "error": "x"}, {"turn_index": "x"}],
)
def test_a_number_that_no_column_can_hold_costs_its_line_only(attempt, tmp_path, change):
    lines = [attempt.record(at=i, seconds=1, **(change if i == 1 else {})) for i in range(3)]
    found = read_records(write(tmp_path / "r.jsonl", lines))
    assert (found.succeeded, found.unreadable) == (2, 1)
    assert len(found.answered) == len(found.answered["ttft_s"]) == 2


def test_P11_a_missing_metric_is_null(attempt, tmp_path):
    found = read_records(write(tmp_path / "r.jsonl", [attempt.record(at=0, seconds=1, time_to_first_token=None)]))
    assert math.isnan(found.answered["ttft_s"][0])
    assert found.answered["e2e_s"][0] == 1.0


def test_bare_numbers_of_old_files_are_milliseconds(attempt, tmp_path):
    line = attempt.record(at=0, seconds=1)
    line["metrics"] = {"time_to_first_token": 20, "input_sequence_length": 7}
    del line["metadata"]["benchmark_phase"]
    found = read_records(write(tmp_path / "r.jsonl", [line]))
    assert (found.succeeded, found.answered["ttft_s"][0], found.answered["input_tokens"][0]) == (1, 0.02, 7)


@pytest.mark.parametrize(
    ("text", "value"), [("15,559.05", 15559.05), ("1e3", 1000.0), (3, 3.0), (None, None), ("", None), (True, None)]
)
def test_P2_numbers_as_text(text, value):
    assert number(text) == value or (value is None and math.isnan(number(text)))


@pytest.mark.parametrize(
    ("error", "category"),
    [
        ({"type": "ServerError", "code": 500}, "ServerError"),
        ({"code": 429, "message": "slow down"}, "429"),
        ({"type": "", "message": "boom: z"}, "boom"),
        ("timed out: 600 s", "timed out"),
        ({"message": None}, "unknown"),
    ],
)
def test_error_categories(error, category):
    assert error_category(error) == category


@pytest.mark.parametrize(
    ("error", "gave_up"),
    [
        ({"type": "TimeoutError", "message": "TimeoutError()"}, True),
        ({"type": "SocketTimeoutError", "message": "x"}, True),
        ({"type": "RequestSendTimeout", "code": None, "message": "x"}, True),
        ({"message": "timed out: 600 s"}, True),
        ("deadline", True),
        ({"type": "Gateway Timeout", "code": 504, "message": "x"}, False),
        ({"type": "RequestCancellationError", "code": 499, "message": "x"}, False),
        ({"type": "ServerDisconnectedError", "message": "after the timeout of a proxy"}, False),
        ("boom: z", False),
    ],
)
def test_V7_only_the_clients_own_time_out_is_one(error, gave_up):
    assert is_timeout(error) is gave_up


def test_V7_time_outs_are_failed_requests_whose_wait_is_kept(attempt, tmp_path):
    lines = [attempt.record(at=i, seconds=600, error="deadline") for i in range(2)]
    lines += [attempt.record(at=1, seconds=600, error="deadline", was_cancelled=True)]
    lines += [{"session": 3, "error": "deadline"}]
    found = read_records(write(tmp_path / "r.jsonl", lines), processes=2)
    assert (found.failed, found.cancelled, found.timed_out) == (3, 1, 3)
    waits = (found.unanswered["end_ns"] - found.unanswered["start_ns"]) / 1e9
    assert waits[found.unanswered["gave_up"] == 1].tolist() == [600, 600]


def test_a_missing_file_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        read_records(tmp_path / "none.jsonl")


def test_flat_records_of_a_small_client(tmp_path):
    good = {"session": 3, "turn": 1, "start": 0.5, "error": None, "ttft": 0.1, "latency": 1.0, "itl": 0.01}
    lines = [
        {**good, "prompt_tokens": 9, "completion_tokens": 5, "cached_tokens": 4},
        {"session": 3, "error": "deadline"},
    ]
    found = read_records(write(tmp_path / "r.jsonl", lines))
    assert (found.succeeded, found.failed, found.unreadable, found.wall_clock) == (1, 1, 0, False)
    assert [float(found.answered[key][0]) for key in ("ttft_s", "e2e_s", "cached_tokens")] == [0.1, 1.0, 4.0]


kinds = st.sampled_from(["good", "failed", "cancelled", "warmup", "warmup failed", "torn", "foreign", "blank"])


@given(st.lists(kinds, max_size=40), st.integers(1, 5))
def test_classes_add_up_and_any_split_reads_the_same(tmp_path_factory, rows, processes):
    from tests.unit.conftest import Attempt  # noqa: PLC0415

    make = Attempt.record
    lines = {
        "good": lambda i: json.dumps(make(at=i, seconds=1, root_correlation_id=f"s{i % 3}")),
        "failed": lambda i: json.dumps(make(at=i, seconds=1, error={"code": 500})),
        "cancelled": lambda i: json.dumps(make(at=i, seconds=1, was_cancelled=True)),
        "warmup": lambda i: json.dumps(make(at=i, seconds=1, benchmark_phase="warmup")),
        "warmup failed": lambda i: json.dumps(make(at=i, seconds=1, benchmark_phase="warmup", error="x")),
        "torn": lambda i: json.dumps(make(at=i, seconds=1))[: 40 + i],
        "foreign": lambda _: '{"hello": 1}',
        "blank": lambda _: "  ",
    }
    path = tmp_path_factory.mktemp("rows") / "r.jsonl"
    path.write_text("\n".join(lines[row](i) for i, row in enumerate(rows)))
    whole = read_records(path, processes=1)
    assert whole.total == sum(row != "blank" for row in rows)
    for row, count in (("good", whole.succeeded), ("failed", whole.failed), ("cancelled", whole.cancelled)):
        assert count == rows.count(row)
    size = path.stat().st_size
    cuts = [size * part // processes for part in range(processes + 1)]
    first, *others = (module._Table() for _ in range(processes))
    first.fill(path, cuts[0], cuts[1])
    for other, (start, stop) in zip(others, itertools.pairwise(cuts[1:]), strict=True):
        other.fill(path, start, stop)
        first.append(other)
    joined = first.finish()
    assert [getattr(joined, count) for count in module.COUNTS] == [getattr(whole, count) for count in module.COUNTS]
    for codes, names in (("session", "sessions"), ("conversation", "conversations")):
        assert [getattr(joined, names)[i] for i in joined.answered[codes]] == [
            getattr(whole, names)[i] for i in whole.answered[codes]
        ]
    for name in module.ANSWERED.keys() - {"session", "conversation"}:
        assert np.array_equal(joined.answered[name], whole.answered[name], equal_nan=True)
    for name in module.UNANSWERED:
        assert joined.unanswered[name].tolist() == whole.unanswered[name].tolist()
    assert joined.repeated == whole.repeated
    assert joined.profiled_error_categories == whole.profiled_error_categories
    assert (joined.traces, joined.last_warmup_end_ns) == (whole.traces, whole.last_warmup_end_ns)


def test_two_processes_read_what_one_reads(attempt, tmp_path):
    path = write(tmp_path / "r.jsonl", [attempt.record(at=i, seconds=1) for i in range(50)])
    one, two = read_records(path, processes=1), read_records(path, processes=2)
    for name in module.ANSWERED:
        assert np.array_equal(one.answered[name], two.answered[name], equal_nan=True)
    assert one.total == two.total == 50


@pytest.mark.parametrize("full", [0, 1], ids=["of the other process", "of its own"])
def test_no_room_for_temporary_files_is_one_message_whichever_process_meets_it(attempt, tmp_path, monkeypatch, full):
    path = write(tmp_path / "r.jsonl", [attempt.record(at=i, seconds=1) for i in range(50)])
    made, make = itertools.count(), tempfile.TemporaryFile
    monkeypatch.setattr(
        tempfile,
        "TemporaryFile",
        lambda: Path("/dev/full").open("r+b") if next(made) == full else make(),  # noqa: SIM115
    )
    with pytest.raises(InputError, match="No space left on device; try again where there is more room for temporary"):
        read_records(path, processes=2)


def test_a_reader_that_is_killed_is_one_message_and_no_half_of_the_records(attempt, tmp_path, monkeypatch):
    path = write(tmp_path / "r.jsonl", [attempt.record(at=i, seconds=1) for i in range(50)])
    monkeypatch.setattr(module, "_send_part", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(InputError, match=r"r\.jsonl: a process that read a part of it was killed"):
        read_records(path, processes=2)
