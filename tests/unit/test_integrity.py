"""Answers before and after: rounding is not a change, a wrong block is one, and what cannot be told is said."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workflow.contract import Reason
from workflow.integrity import (
    CEILING,
    FLOOR,
    PROMPTS,
    Answer,
    Token,
    difference,
    finding,
    in_words,
    judge,
    prompts,
    read_answer,
    settled_length,
    write,
)
from workflow.readers.probes import changed_answers, read_probes


def answer(*tokens, cached=0):
    made = tuple(Token(text=text, logprob=logprob, runner_up=runner_up) for text, logprob, runner_up in tokens)
    return Answer(tokens=made, prompt_tokens=100, cached_tokens=cached)


SURE = (("a", -0.1, -3.0), ("b", -0.2, -2.5), ("c", -0.1, -4.0))


def shifted(by, tokens=SURE, cached=0):
    return answer(*((text, logprob + by, runner_up) for text, logprob, runner_up in tokens), cached=cached)


def rounds(*some):
    """Return an answer to each prompt, each surer of itself than the next, as of a model that reads its prompts."""
    listed = some if len(some) == PROMPTS else some * PROMPTS
    return tuple(
        one.model_copy(
            update={
                "tokens": tuple(
                    token.model_copy(update={"logprob": token.logprob - i, "runner_up": token.runner_up - i})
                    for token in one.tokens
                )
            }
        )
        for i, one in enumerate(listed)
    )


def test_prompts_are_fixed_long_and_different():
    assert prompts() == prompts()
    assert len(set(prompts())) == PROMPTS
    assert all(len(text.split()) > 550 for text in prompts())


def test_equal_answers_hold():
    seen = judge(rounds(answer(*SURE)), rounds(answer(*SURE)), rounds(answer(*SURE, cached=90)))
    assert (seen.changed, seen.tolerance, seen.cached_share) == ((), FLOOR, 0.9)
    assert finding(seen) is None
    assert "0 of 4 answers changed" in in_words(seen)
    assert "90% of their prompt tokens came from a cache" in in_words(seen)


def test_a_model_that_answers_every_prompt_alike_is_not_checked():
    """As with the weights that vLLM draws for `--load-format dummy`: wrong blocks would pass as right ones."""
    alike = (answer(*SURE, cached=90),) * PROMPTS
    seen = judge(alike, alike, alike)
    assert seen.blind
    assert in_words(seen).startswith("not checked: this model answers different prompts alike")
    changed = judge(alike, alike, (shifted(3.0, cached=90),) * PROMPTS)
    assert "4 of 4 answers changed" in in_words(changed)


def test_prompts_that_were_computed_again_test_nothing():
    seen = judge(rounds(answer(*SURE)), rounds(answer(*SURE, cached=90)), rounds(answer(*SURE, cached=2)))
    assert in_words(seen) == "not checked: none of the prompts came from a cache when they were asked again"


def test_a_difference_that_the_device_cache_makes_as_well_is_normal():
    seen = judge(rounds(answer(*SURE)), rounds(shifted(0.05)), rounds(shifted(0.08)))
    assert seen.tolerance == pytest.approx(0.2)
    assert seen.changed == ()


def test_a_difference_beyond_the_normal_is_a_finding():
    good, bad = answer(*SURE), shifted(-0.3)
    seen = judge(rounds(good), rounds(shifted(0.01)), rounds(good, good, bad, good))
    assert seen.changed == (2,)
    found = finding(seen)
    assert found.code == Reason.KV_INTEGRITY
    assert "1 of 4" in found.detail


def test_fluent_nonsense_is_a_finding_whatever_its_own_confidence():
    wrong = answer(("x", -0.1, -3.0), ("y", -0.2, -2.5), ("z", -0.1, -4.0))
    seen = judge(rounds(answer(*SURE)), rounds(answer(*SURE)), rounds(wrong))
    assert seen.changed == (0, 1, 2, 3)


def test_a_near_tie_that_flips_is_none_and_what_follows_it_does_not_count():
    tie = answer(("a", -0.1, -3.0), ("b", -0.70, -0.703), ("c", -0.1, -3.0))
    flipped = answer(("a", -0.1, -3.0), ("q", -0.701, -0.704), ("r", -2.0, -2.5))
    assert difference(tie, flipped) < FLOOR
    assert judge(rounds(tie), rounds(tie), rounds(flipped)).changed == ()


def test_an_answer_that_ends_early_is_another_answer():
    assert difference(answer(*SURE), answer(*SURE[:2])) > CEILING


def test_an_unsteady_engine_is_not_checked_and_not_called_checked(tmp_path):
    seen = judge(rounds(answer(*SURE)), rounds(shifted(0.4)), rounds(shifted(3.0)))
    assert (seen.tolerance, seen.changed) == (None, ())
    assert in_words(seen).startswith("not checked")
    write(tmp_path, seen)
    assert not (tmp_path / "probes.before.json").exists()


@given(st.lists(st.floats(-0.004, 0.004), min_size=3, max_size=3))
def test_noise_below_the_floor_never_is_a_finding(noise):
    noisy = answer(*((text, logprob + n, runner) for (text, logprob, runner), n in zip(SURE, noise, strict=True)))
    assert judge(rounds(answer(*SURE)), rounds(answer(*SURE)), rounds(noisy)).changed == ()


def test_probe_files_hold_what_rounding_cannot_change(tmp_path):
    tie = answer(("a", -0.1, -3.0), ("b", -0.70, -0.703), ("c", -0.1, -3.0))
    flipped = answer(("a", -0.1, -3.0), ("q", -0.701, -0.704), ("r", -2.0, -2.5))
    assert settled_length(tie, FLOOR) == 1
    write(tmp_path, judge(rounds(tie), rounds(tie), rounds(flipped)))
    before, after = tmp_path / "probes.before.json", tmp_path / "probes.after.json"
    assert set(read_probes(before).values()) == {"a"}
    assert changed_answers(before, after) == ()


def test_probe_files_show_a_changed_answer(tmp_path):
    """M1: a store without its master gives garbled answers, not errors."""
    wrong = answer(("x", -0.1, -3.0), ("y", -0.2, -2.5), ("z", -0.1, -4.0))
    good = answer(*SURE)
    write(tmp_path, judge(rounds(good), rounds(good), rounds(good, wrong, good, good)))
    assert changed_answers(tmp_path / "probes.before.json", tmp_path / "probes.after.json") == (prompts()[1],)


def test_answers_are_read_from_chat_completions():
    entry = {"token": "a", "logprob": -0.5, "top_logprobs": [{"logprob": -0.5}, {"logprob": -2}]}
    reply = {
        "choices": [{"logprobs": {"content": [entry]}}],
        "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}},
    }
    assert read_answer(reply) == Answer(
        tokens=(Token(text="a", logprob=-0.5, runner_up=-2.0),), prompt_tokens=9, cached_tokens=8
    )
    del reply["usage"]
    assert read_answer(reply).cached_tokens is None


@pytest.mark.parametrize(
    "reply",
    [
        "HTTP Error 400",
        {},
        {"choices": []},
        {"choices": [{"logprobs": None}]},
        {"choices": [{"logprobs": {"content": 3}}]},
    ],
)
def test_a_server_without_log_probabilities_is_said(reply):
    assert isinstance(read_answer(reply), str)
