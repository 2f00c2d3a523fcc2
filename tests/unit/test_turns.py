"""Who fails with whom where points take turns on one server. The server itself is real in tests/end_to_end."""

import contextlib
import json
import threading
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from points import point

from workflow import turns
from workflow.attempt import Interrupted
from workflow.config import Cluster
from workflow.failures import AttemptFailed, Failure, FailureClass
from workflow.lease import live_lease
from workflow.serving import Emptying
from workflow.turns import Allocation, Outcome, make_cold, measure_all

IDS = ("p", "q", "r")


class Bench:
    """An allocation for three points; `ends` says how each turn ends, None is well."""

    def __init__(self, root, monkeypatch):
        self.root, self.ends, self.turned, self.held = root, {}, [], []
        self.outcome = Outcome(schema_version=Outcome.SCHEMA_VERSION, measured={}, failed={}, given_up=())
        monkeypatch.setattr(turns, "served", self.served)
        monkeypatch.setattr(turns, "take_turn", self.take_turn)
        monkeypatch.setattr(turns, "publish", lambda *_: None)
        monkeypatch.setattr(Allocation, "attempt_at", lambda _self, one, *_: SimpleNamespace(point=one, folder=root))

    @contextlib.contextmanager
    def served(self, host, _left_behind):
        host.point = SimpleNamespace(plan=SimpleNamespace(services=()))
        yield ()

    def take_turn(self, attempt, shared, _name):
        self.turned.append((attempt.point.id, shared.points_before))
        self.held.append([one for one in IDS if live_lease(self.root / "runs" / one)])
        if (error := self.ends.get(attempt.point.id)) is not None:
            raise error

    def measure(self, name="job1-20260101T000000"):
        points = tuple(point().model_copy(update={"id": one}) for one in IDS)
        cluster = Cluster(launcher="bare")
        made = Allocation(
            "0123456789-1", name, points, self.root, self.root / "envs", cluster, None, None, self.outcome
        )
        code = measure_all(made)
        self.outcome = made.outcome
        return code

    def failures(self):
        records = [Failure.read(path) for path in (self.root / "failures").glob("*.json")]
        return {record.point: record.failure_class for record in records}


@pytest.fixture
def bench(tmp_path, monkeypatch):
    return Bench(tmp_path, monkeypatch)


def test_every_point_is_let_go_when_it_is_measured(bench):
    assert bench.measure() == 0
    assert bench.turned == [("p", 0), ("q", 1), ("r", 2)]
    assert bench.held == [["p", "q", "r"], ["q", "r"], ["r"]]
    assert not list(bench.root.glob("runs/*/lease.json"))
    assert set(bench.outcome.measured) == set(IDS)


@pytest.mark.parametrize("kind", [FailureClass.CLIENT_FAILED, FailureClass.SCRATCH_FULL])
def test_what_a_points_own_sessions_bring_about_costs_this_point_only(bench, kind):
    bench.ends["q"] = AttemptFailed(kind, "no summary")
    assert bench.measure() == 0
    assert list(bench.outcome.measured) == ["p", "r"]
    assert bench.turned[-1] == ("r", 2), "the server has served the one that failed, too"
    assert bench.failures() == {"q": kind}


def test_a_server_that_dies_fails_what_was_not_measured_and_the_next_try_measures_that(bench):
    bench.ends["q"] = AttemptFailed(FailureClass.ENGINE_DIED, "killed by signal 9")
    assert bench.measure() == 1
    assert bench.failures() == {"q": FailureClass.ENGINE_DIED, "r": FailureClass.ENGINE_DIED}
    kept = json.loads((bench.root / "shared/0123456789-1/outcome.json").read_text())
    assert list(kept["measured"]) == ["p"]

    bench.ends, bench.turned = {}, []
    assert bench.measure("job2-20260101T000001") == 0
    assert bench.turned == [("q", 0), ("r", 1)]
    assert bench.outcome.failed == {}


def test_what_is_not_worth_another_try_is_not_tried_again(bench):
    bench.ends["p"] = AttemptFailed(FailureClass.VERSION_MISMATCH, "another version serves")
    assert bench.measure() == 1
    assert set(bench.outcome.given_up) == set(IDS)
    bench.turned = []
    assert bench.measure("job2-20260101T000001") == 0
    assert bench.turned == []


def test_a_signal_is_told_at_every_point_that_was_not_measured(bench):
    bench.ends["q"] = Interrupted("stopped by SIGTERM", 143)
    assert bench.measure() == 143
    assert bench.failures() == {"q": FailureClass.INTERRUPTED, "r": FailureClass.INTERRUPTED}
    assert not list(bench.root.glob("runs/*/lease.json"))


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        pytest.param([100, 0, 0], "was asked a moment ago", id="a server that reports no hit proves nothing"),
        pytest.param([None], "does not say how much", id="a server that reports nothing proves nothing"),
        pytest.param([0, 100] * 4 + [90] * 99, "still has 90%", id="a server that was not emptied"),
    ],
)
def test_a_server_is_not_taken_for_cold(monkeypatch, asked, says):
    answers = iter(asked)

    def ask_one(_attempt, _prompt):
        return SimpleNamespace(cached_tokens=next(answers, 0), prompt_tokens=100)

    monkeypatch.setattr(turns.integrity, "ask_one", ask_one)
    with pytest.raises(AttemptFailed, match=says):
        make_cold(attempt_emptied_by(Emptying()))


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(turns, "SETTLE_S", 0.0)


def attempt_emptied_by(emptying, scratch=None):
    point = SimpleNamespace(plan=SimpleNamespace(empties=emptying))
    return SimpleNamespace(point=point, url=lambda port, path: f"{port}{path}", scratch=scratch)


def test_a_server_that_was_busy_when_it_was_told_is_told_again(monkeypatch, tmp_path):
    told, answers = [], iter([0, 100] * 4 + [100] * 4)
    monkeypatch.setattr(turns.endpoints, "tell", told.append)
    monkeypatch.setattr(
        turns.integrity, "ask_one", lambda *_: SimpleNamespace(cached_tokens=next(answers, 0), prompt_tokens=100)
    )
    emptying = Emptying(posts=(("lmcache-0-http", "/cache/clear"), ("engine", "/reset")), folders=("kv-tier",))
    kept = tmp_path / "kv-tier/a/b"
    kept.mkdir(parents=True)
    (kept / "block").write_bytes(b"1")
    assert make_cold(attempt_emptied_by(emptying, tmp_path)).endswith("at most 0% after it")
    assert told == ["lmcache-0-http/cache/clear", "engine/reset"] * 3, "twice until it is cold, once after the proof"
    assert kept.is_dir()
    assert not list(kept.iterdir())


REFUSED = b'{"success": false}'


@pytest.fixture
def server():
    """Return an HTTP server that answers each POST 200 and with the next of its `bodies`, the last again and again."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(one.bodies.pop(0) if len(one.bodies) > 1 else one.bodies[0])

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as one:
        threading.Thread(target=one.serve_forever, daemon=True).start()
        yield one
        one.shutdown()


@pytest.mark.parametrize(
    ("bodies", "refused"),
    [
        ([b""], False),
        ([b'{"success": true}'], False),
        ([b"Cache flushed.\n"], False),
        ([b"[]"], False),
        ([REFUSED], True),
        ([REFUSED, b'{"success": true}'], False),
    ],
    ids=["older vLLM", "done", "SGLang", "a list", "refused", "refused once"],
)
def test_P22_a_server_that_answers_200_and_refuses_has_not_emptied_its_caches(server, bodies, refused):
    server.bodies = bodies
    attempt = attempt_emptied_by(Emptying(posts=(("engine", "/reset_prefix_cache"),)))
    attempt.url = lambda _port, path: f"http://127.0.0.1:{server.server_port}{path}"
    expected = pytest.raises(AttemptFailed, match=r'it answers \{"success": false\}') if refused else nullcontext()
    with expected:
        turns._empty(attempt)


def test_a_server_that_refuses_to_be_emptied_is_not_shared_further(monkeypatch):
    monkeypatch.setattr(turns.endpoints, "tell", lambda _url: "HTTPError: HTTP Error 404: Not Found")
    monkeypatch.setattr(turns.integrity, "ask_one", lambda *_: SimpleNamespace(cached_tokens=100, prompt_tokens=100))
    with pytest.raises(AttemptFailed, match=r"did not empty its caches: /reset: HTTPError: HTTP Error 404"):
        make_cold(attempt_emptied_by(Emptying(posts=(("engine", "/reset"),))))


@pytest.mark.parametrize(("cached", "cold"), [(None, True), (5, True), (90, False)])
def test_a_server_that_kept_what_the_proof_asked_is_not_cold(cached, cold):
    first = SimpleNamespace(cached_tokens=cached, prompt_tokens=100)
    again = SimpleNamespace(cached_tokens=98, prompt_tokens=100)
    rounds = ((first,), (again,))
    if cold:
        turns.still_cold(rounds)
    else:
        with pytest.raises(AttemptFailed, match="still has 90% of a prompt cached that its proof asked"):
            turns.still_cold(rounds)
