"""The generator looks like the recorded sessions, scaling keeps what is shared, a set is what it was declared to be."""

import json
import tarfile
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workflow import traces
from workflow.config import GeneratedTraces, RecordedTraces, TraceFilter
from workflow.contract import InputError, file_sha256
from workflow.traces import SubAgent, Trace, ceiling_share, generate, prepare, scale_trace


def spec(**changes):
    base = {
        "kind": "generated",
        "seed": 1,
        "sessions": 12,
        "turns_max": 400,
        "prompt_tokens_max": 500_000,
        "scale": 1,
        "think_time_cap_s": 1000.0,
    }
    return GeneratedTraces(**{**base, **changes})


@pytest.fixture(scope="module")
def many():
    return list(generate(spec(sessions=250, subagent_share=0.1)))


def main_requests(trace):
    return [request for request in trace.requests if not isinstance(request, SubAgent)]


@pytest.mark.parametrize(
    ("recorded", "measure"),
    [
        (traces.TURNS, lambda trace: [len(main_requests(trace))]),
        (traces.OUTPUT_TOKENS, lambda trace: [request.output_tokens for request in main_requests(trace)]),
        (traces.API_TIME_S, lambda trace: [request.api_time for request in main_requests(trace)]),
        (traces.THINK_TIME_S, lambda trace: [request.think_time for request in main_requests(trace)[1:]]),
        (traces.SYSTEM_TOKENS, lambda trace: [trace.system_tokens]),
        (traces.TOOL_TOKENS, lambda trace: [trace.tool_tokens]),
    ],
    ids=["turns", "output", "api time", "think time", "system", "tools"],
)
def test_generated_quantiles_are_close_to_the_recorded_ones(many, recorded, measure):
    values = [value for trace in many for value in measure(trace)]
    # Inside 5 to 95 %: the tails are cut off, so the generated quantiles lie a little inside the recorded ones.
    for q, expected in zip((0.25, 0.5, 0.75), recorded[1:4], strict=True):
        assert np.quantile(values, q) == pytest.approx(expected, rel=0.35), q


def test_generated_sessions_share_as_much_as_the_recorded_ones(many):
    assert ceiling_share(many) == pytest.approx(0.964, abs=0.02)


def test_prompts_grow_on_their_prefix_and_compaction_keeps_system_and_tools(many):
    shrinks = turns = 0
    for trace in many:
        prefix = (trace.system_tokens + trace.tool_tokens) // traces.BLOCK_TOKENS
        for before, after in pairwise(main_requests(trace)):
            turns += 1
            assert len(after.hash_ids) == after.input_tokens // trace.block_size
            if after.input_tokens < before.input_tokens:
                shrinks += 1
                assert after.hash_ids[:prefix] == before.hash_ids[:prefix]
            else:
                assert after.hash_ids[: len(before.hash_ids)] == before.hash_ids
    assert shrinks / turns == pytest.approx(traces.COMPACTION_SHARE, abs=0.004)


def test_sub_agents_have_a_prefix_of_their_own(many):
    agents = [(trace, agent) for trace in many for agent in trace.requests if isinstance(agent, SubAgent)]
    assert len(agents) == pytest.approx(25, abs=12)
    for trace, agent in agents:
        own = {block for request in agent.requests for block in request.hash_ids}
        assert not own & {block for request in main_requests(trace) for block in request.hash_ids}


def test_more_sessions_do_not_change_the_first_ones():
    assert list(generate(spec(sessions=3))) == list(generate(spec(sessions=9)))[:3]


def test_no_prompt_is_longer_than_declared():
    longest = max(r.input_tokens for trace in generate(spec(prompt_tokens_max=30_000)) for r in main_requests(trace))
    assert longest <= 30_000


def test_a_limit_below_any_recorded_prompt_is_refused():
    with pytest.raises(InputError, match="below the shortest recorded first prompt"):
        list(generate(spec(prompt_tokens_max=5_000)))


@given(scale=st.sampled_from([1, 2, 4, 8, 16, 32, 64]))
def test_scaling_divides_counts_and_times_and_keeps_the_sharing(scale):
    trace = next(generate(spec(sessions=1, turns_max=6, subagent_share=1.0)))
    small = scale_trace(trace, scale)
    assert small.block_size == trace.block_size // scale
    for before, after in zip(trace.all_requests(), small.all_requests(), strict=True):
        assert after.input_tokens == before.input_tokens // scale
        assert after.hash_ids == before.hash_ids
        assert after.t == pytest.approx(before.t / scale)
    assert ceiling_share([small]) == ceiling_share([trace])


def test_a_scale_that_breaks_blocks_is_refused():
    with pytest.raises(InputError, match="scale 5 does not divide the block size 64"):
        list(generate(spec(scale=5)))


def test_ceiling_of_a_session_counted_by_hand():
    def request(ids):
        return {"t": 0, "type": "n", "model": "m", "in": 64 * len(ids), "out": 1, "hash_ids": ids, "input_types": [],
                "output_types": [], "stop": ""}  # fmt: skip

    trace = Trace.model_validate(
        {
            "id": "a",
            "models": ["m"],
            "block_size": 64,
            "hash_id_scope": "local",
            "requests": [request([1, 2]), request([1, 2, 3]), request([9])],
        }
    )
    assert ceiling_share([trace]) == 2 / 6
    # Ids of another session are other blocks.
    assert ceiling_share([trace, trace.model_copy(update={"id": "b"})]) == 4 / 12


def test_a_generated_set_is_written_with_its_manifest_last(tmp_path):
    manifest = prepare("demo", spec(sessions=4, turns_max=5, scale=16), tmp_path, tmp_path / "out")
    assert manifest.sessions == 4
    files = sorted((tmp_path / "out" / "sessions").glob("*.json"))
    assert len(files) == 4
    assert manifest.requests == sum(len(list(Trace.model_validate_json(f.read_bytes()).all_requests())) for f in files)
    again = prepare("demo", spec(sessions=4, turns_max=5, scale=16), tmp_path, tmp_path / "again")
    assert again.content_sha256 == manifest.content_sha256


@pytest.fixture
def recorded(tmp_path):
    archive = tmp_path / "set.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for trace in generate(spec(sessions=5, turns_max=4)):
            file = tmp_path / f"{trace.id}.json"
            file.write_bytes(trace.to_json())
            tar.add(file, file.name)

    def declare(**changes):
        base = {
            "kind": "recorded",
            "path": "set.tar.gz",
            "source": "somewhere",
            "revision": "r1",
            "licence": "Apache-2.0",
        }
        base |= {"revision": "r1", "licence": "Apache-2.0", "sha256": file_sha256(archive)}
        return RecordedTraces(**{**base, **changes})

    return declare


def test_a_recorded_set_is_filtered_then_scaled(tmp_path, recorded):
    declared = recorded(filter=TraceFilter(max_sessions=2), scale=16)
    manifest = prepare("rec", declared, tmp_path, tmp_path / "out")
    assert manifest.sessions == 2
    assert json.loads((tmp_path / "out/sessions/generated_0000.json").read_text())["block_size"] == 4


def test_a_recorded_set_that_is_missing_says_where_it_comes_from(tmp_path, recorded):
    with pytest.raises(InputError, match=r"not at .*gone\.tar.*fetch somewhere at r1 \(Apache-2\.0\)"):
        prepare("rec", recorded(path="gone.tar"), tmp_path, tmp_path / "out")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda sent: sent[-1].update(nvext={}), r"requests\.\d+\.request\.nvext"),
        (lambda sent: sent[-1].update(output_length=sent[-1].pop("out")), r"requests\.\d+\.request\.out"),
        (lambda sent: [one.update(out=0) for one in sent], "no request of .* has an output token"),
        (lambda sent: sent[-1].update(t=0.0), "begins at 0 s, before the one in front of it"),
        (
            lambda sent: sent[-1].update({"in": 128 * len(sent[-1]["hash_ids"]), "hash_ids": 2 * sent[-1]["hash_ids"]}),
            "a block twice in its prompt",
        ),
        (lambda sent: sent[-1].update(hash_ids=sent[-1]["hash_ids"][-3:]), "has 3 hash ids for"),
    ],
    ids=["unknown key", "another client's key", "no output", "back in time", "history twice", "only what is new"],
)
def test_P5_a_session_that_would_replay_as_another_load_is_refused(tmp_path, spoil, says):
    (trace,) = generate(spec(sessions=1, prompt_tokens_max=40_000))
    data = json.loads(trace.to_json())
    (tmp_path / "set").mkdir()
    declared = {"kind": "recorded", "path": "set", "source": "s", "revision": "r1", "licence": "Apache-2.0"}

    def read():
        (tmp_path / "set/one.json").write_text(json.dumps(data))
        sha256 = traces.folder_sha256(tmp_path / "set")
        return list(traces.read_recorded(RecordedTraces(**declared, sha256=sha256), tmp_path))

    assert read() == [trace]
    spoil(data["requests"])
    with pytest.raises(InputError, match=says) as error:
        read()
    assert str(error.value).startswith(str(tmp_path / "set/one.json"))


def test_another_file_than_declared_is_refused(tmp_path, recorded):
    with pytest.raises(InputError, match=f"allowed: {'0' * 64}"):
        prepare("rec", recorded(sha256="0" * 64), tmp_path, tmp_path / "out")


def test_a_filter_that_leaves_nothing_is_refused(tmp_path, recorded):
    with pytest.raises(InputError, match="leaves no session"):
        prepare("rec", recorded(filter=TraceFilter(max_prompt_tokens=10)), tmp_path, tmp_path / "out")
    assert not (tmp_path / "out" / "trace_set.json").exists()


def test_the_recorded_sessions_beside_the_checkout_can_be_read(shared, tmp_path):
    archive = shared / "traces" / "claude-code-weka-134.tar.xz"
    declared = RecordedTraces(
        kind="recorded", path=str(archive), source="kv-cache-tester", revision="94f6046", licence="Apache-2.0",
        sha256=file_sha256(archive), filter=TraceFilter(max_prompt_tokens=70_000, max_sessions=16), scale=16,
    )  # fmt: skip
    manifest = prepare("rec", declared, tmp_path, tmp_path / "out")
    assert manifest.sessions == 16
    assert manifest.longest_prompt_tokens <= 70_000 // 16
    assert 0.85 < manifest.ceiling_share < 0.99
