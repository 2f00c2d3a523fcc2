"""When a replay is ended early, and what is kept of it while it runs."""

import gzip
import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.arms import plan
from workflow import watch
from workflow.config import Replay
from workflow.contract import Reason
from workflow.readers.power_samples import read_power
from workflow.watch import (
    STEP_TOKENS,
    STORM,
    Clock,
    RecordTail,
    Sampler,
    Stall,
    append_gzip,
    error_text,
    sample,
    start_power_samples,
    totals,
)

VLLM = b"""\
# HELP vllm:num_requests_running Number of requests
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a b"} 3.0
vllm:num_requests_running{engine="1",model_name="a b"} 1.0
vllm:num_requests_waiting{engine="0"} 2.0
vllm:generation_tokens_total{engine="0"} 1.5e+03
vllm:generation_tokens_created{engine="0"} 1.7e+09
vllm:prompt_tokens_total{engine="0"} 100
vllm:request_success_total{engine="0"} 7
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (VLLM, (1600.0, 6.0)),
        (
            b"llamacpp:requests_processing 1\nllamacpp:n_decode_total 12\nllamacpp:tokens_predicted_total 30\n",
            (12 * STEP_TOKENS + 30, 1.0),
        ),
        (b'sglang:num_running_reqs{r="0"} 0\nsglang:num_queue_reqs 4\nsglang:generation_tokens_total 5\n', (5.0, 4.0)),
        (b"something_else 1\n", (None, None)),
        (b"", (None, None)),
    ],
)
def test_work_and_pending_requests_are_read_from_raw_text(text, expected):
    assert totals(text) == expected


def looks(stall, samples):
    return [stall.see(now, scrape) for now, scrape in samples]


def test_requests_without_a_token_are_a_stall_after_the_limit():
    stall = Stall(10.0)
    found = looks(stall, [(0, (5.0, 2.0)), (5, (5.0, 2.0)), (9.9, (5.0, 2.0)), (10, (5.0, 2.0))])
    assert found[:3] == [None] * 3
    assert "2 requests and no token for 10 s" in found[3]


def test_work_begins_the_count_anew():
    assert looks(Stall(10.0), [(0, (5.0, 2.0)), (9, (26.0, 2.0)), (18, (26.0, 2.0))]) == [None] * 3


def test_M5_a_server_that_crawls_is_ended_although_it_does_something():
    """Ten requests of 1,000 and 1,000 tokens that take four hours are 1.4 tokens a second."""
    samples = [(at, (1.4 * at, 10.0)) for at in range(0, 301, 5)]
    *before, last = looks(Stall(300.0), samples)
    assert before == [None] * 60
    assert last == "10 requests and only 420 tokens in 300 s"
    assert looks(Stall(300.0), [(at, (2.1 * at, 10.0)) for at in range(0, 3001, 5)]) == [None] * 601


def test_M5_a_long_prompt_on_a_slow_engine_that_counts_steps_is_no_crawl():
    text = b"llamacpp:requests_processing 1\nllamacpp:n_decode_total %d\n"
    assert looks(Stall(300.0), [(at, totals(text % (at // 120))) for at in range(0, 3001, 5)]) == [None] * 601


def test_a_server_that_started_again_begins_the_count_anew():
    assert looks(Stall(10.0), [(0, (500.0, 2.0)), (9, (5.0, 2.0)), (18, (5.0, 2.0))]) == [None] * 3


def test_an_idle_server_is_no_stall_and_its_idle_time_does_not_count():
    assert looks(Stall(10.0), [(0, (5.0, 0.0)), (100, (5.0, 0.0)), (105, (5.0, 1.0)), (109, (5.0, 1.0))]) == [None] * 4


def test_queued_requests_of_a_dead_locked_scheduler_are_a_stall():
    """L11: pins lower the token budget, nothing runs, health is fine."""
    text = b"sglang:num_running_reqs 0\nsglang:num_queue_reqs 9\nsglang:generation_tokens_total 5\n"
    assert looks(Stall(10.0), [(0, totals(text)), (10, totals(text))])[1]


def test_metrics_that_stop_answering_are_a_stall():
    found = looks(Stall(10.0), [(0, None), (5, (1.0, 1.0)), (6, None), (15, None), (16, None)])
    assert found[:4] == [None] * 4
    assert "have not answered for 10 s" in found[4]


def test_an_engine_without_known_counters_is_not_judged():
    assert looks(Stall(10.0), [(0, (None, 3.0)), (100, (None, 3.0)), (200, (None, None))]) == [None] * 3


@given(st.lists(st.tuples(st.floats(0.1, 4.9), st.floats(0, 9)), min_size=1, max_size=50))
def test_a_server_that_always_works_is_never_stalled(steps):
    stall, now, work = Stall(5.0), 0.0, 0.0
    for step, pending in steps:
        now, work = now + step, work + 11
        assert stall.see(now, (work, pending)) is None


def test_the_clock_is_watched_against_the_monotonic_one():
    wall, steady = iter([100.0, 101.0, 3702.0, 3703.2]), iter([0.0, 1.0, 2.0, 3.0])
    clock = Clock(lambda: next(wall), lambda: next(steady))
    for _ in range(3):
        clock.look()
    assert clock.jumps_s == [3600.0]
    assert clock.finding().code == Reason.CLOCK_JUMP


def test_a_clock_that_is_slewed_is_no_finding():
    wall, steady = iter([100.0 + 1.01 * i for i in range(500)]), iter([float(i) for i in range(500)])
    clock = Clock(lambda: next(wall), lambda: next(steady))
    for _ in range(499):
        clock.look()
    assert clock.finding() is None


def write(path, records, mode="a"):
    with path.open(mode) as stream:
        stream.writelines(json.dumps(record) + "\n" for record in records)


def failed(message="boom", **metadata):
    return {"metadata": metadata, "error": {"code": 500, "type": "ServerError", "message": message}}


def test_a_storm_is_many_failures_in_a_row_over_several_looks(tmp_path):
    path = tmp_path / "records.jsonl"
    tail = RecordTail(path)
    assert tail.look() is None
    write(path, [failed()] * (STORM - 1))
    assert tail.look() is None
    write(path, [{"metadata": {}, "metrics": {}}])
    write(path, [failed()] * (STORM - 1))
    assert tail.look() is None
    write(path, [failed("the last")])
    assert tail.look() == "500 ServerError the last"


def test_requests_that_the_client_cancels_at_the_end_are_no_storm(tmp_path):
    path = tmp_path / "records.jsonl"
    write(path, [failed(was_cancelled=True)] * 100)
    assert RecordTail(path).look() is None


def test_a_line_that_is_still_being_written_is_read_later(tmp_path):
    path = tmp_path / "records.jsonl"
    tail = RecordTail(path)
    write(path, [failed()] * (STORM - 1))
    text = json.dumps(failed("whole"))
    with path.open("a") as stream:
        stream.write(text[:20])
    assert tail.look() is None
    with path.open("a") as stream:
        stream.write(text[20:] + "\n")
    assert tail.look() == "500 ServerError whole"


@pytest.mark.parametrize(
    ("error", "text"),
    [("a\n b", "a b"), ({"message": "m"}, "m"), ({"code": 404, "type": None, "message": "x"}, "404 x"), (5, "5")],
)
def test_errors_in_one_line(error, text):
    assert error_text(error) == text


def test_samples_can_be_read_up_to_the_one_that_was_cut_off(tmp_path):
    path = tmp_path / "metrics/engine.samples.prom.gz"
    append_gzip(path, sample(1.0, b"a 1"))
    append_gzip(path, sample(2.5, b"a 2\n"))
    whole = path.read_bytes()
    assert gzip.decompress(whole).decode() == "# sampled at 1.000\na 1\n# sampled at 2.500\na 2\n"
    append_gzip(path, sample(3.0, b"a 3"))
    path.write_bytes(path.read_bytes()[:-5])
    with gzip.open(path) as stream:
        assert stream.read(len(gzip.decompress(whole))) == gzip.decompress(whole)


POWER = """\
timestamp, index, power.draw [W], temperature.gpu, clocks.current.sm [MHz], utilization.gpu [%], memory.used [MiB]
2026/12/01 07:23:54.808, 0, 113.31 W, 37, 375 MHz, 0 %, 0 MiB
2026/12/01 07:23:55.814, 0, 78.92 W, 37, 345 MHz, 0 %, 0 MiB
"""


class OnGpu:
    """As much of an attempt as the power samples look at."""

    class launcher:  # noqa: N801
        vendor = "nvidia"

    def __init__(self):
        self.started = []

    def start(self, name, command, log):
        self.started.append((name, command.argv, log))
        return "process"


def test_power_is_sampled_in_the_form_that_metrics_read(tmp_path, monkeypatch):
    """The rows are what nvidia-smi of driver 580.159 wrote on an H200 for this command."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    attempt = OnGpu()
    assert start_power_samples(attempt) == "process"
    ((_, argv, log),) = attempt.started
    assert argv[:2] == (str(tool), "--id=0")
    (tmp_path / log).write_text(POWER)
    times, watts = read_power(tmp_path / log).gpus["0"]
    assert list(watts) == [113.31, 78.92]
    assert times[1] - times[0] == pytest.approx(1.006)


def test_no_power_is_sampled_without_the_tool_or_the_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert start_power_samples(OnGpu()) is None


@pytest.mark.parametrize("backend", ["lmcache", "mooncake"])
def test_an_engine_that_hangs_beside_a_store_that_answers_is_a_stall(tmp_path, monkeypatch, backend):
    arm = plan("minimaxm3-h100-vllm", backend)
    (beside,) = {port for port, _ in arm.metrics} - {"engine"}
    answers = {"engine": VLLM, beside: b"lmcache_mp_l1_read_chunks_total 5\n"}
    monkeypatch.setattr(watch.endpoints, "fetch", lambda url, **_: answers.get(url))
    one = SimpleNamespace(
        point=SimpleNamespace(plan=arm, replay=Replay(duration_s=60.0, grace_s=5.0)),
        folder=tmp_path,
        url=lambda port, _path: port,
    )
    sampler = Sampler(one, None, tmp_path / "records.jsonl")
    assert sampler._scrape() == (1600.0, 6.0)
    del answers["engine"]
    assert sampler._scrape() is None
    kept = gzip.decompress((tmp_path / f"metrics/{beside}.samples.prom.gz").read_bytes())
    assert kept.count(b"# sampled at") == 2, "what the store says is kept all the same"
