"""Are answers still right after their KV cache was evicted and restored? Asked with the same prompts, greedily.

A store that hands back the wrong blocks gives fluent nonsense, not errors. Texts alone cannot tell: a full prefill and
one that was partly cached round differently, and a near tie between two tokens then flips. So log-probabilities are
compared, and what is normal is measured in the same run: each prompt is asked twice in a row before the replay, once
computed in full and once from the device's cache. Nothing but the replay lies between that and the last question.
"""

import json
import random
from itertools import combinations
from pathlib import Path
from typing import Any

from workflow import endpoints
from workflow.attempt import Attempt
from workflow.contract import Document, Finding, Reason, Strict, write_atomic

PROMPTS = 4
WORDS = 600
"""Long enough for whole blocks of every store (256 tokens at most by default), short enough for a small slot."""
MAX_TOKENS = 8
FLOOR = 0.005
"""Smallest tolerance in nats: two equal rounds by luck must not make the next rounding a finding.

Seen with the demo's random model, which minds its context least of all: 4e-5 between a full and a cached prefill, 0.008
to 0.09 where 32 to 256 of a prompt's 600 words were others.
"""
CEILING = 0.5
"""Largest tolerance in nats: an engine this unsteady cannot be checked, and must not pass as checked."""
TEMPLATE_SHARE = 0.05
"""Cached share of the probe prompts that says nothing: the chat template's tokens, which are the same in each."""
FACTOR = 4.0
"""Tolerance / largest difference between the two rounds before the replay; few prompts see little of the spread."""

_WORDS = tuple(
    word
    for line in (
        "river stone garden winter letter market window silver mountain bread harbour candle forest mirror",
        "thunder paper bridge orange shadow engine valley doctor copper island feather summer castle pencil",
    )
    for word in line.split()
)


class Token(Strict):
    """A generated token."""

    text: str
    logprob: float
    runner_up: float | None
    """Log-probability of the second best token."""


class Answer(Strict):
    """What a prompt was answered with."""

    tokens: tuple[Token, ...]
    prompt_tokens: int | None
    cached_tokens: int | None
    """Prompt tokens from any cache, where the server says so."""


class Integrity(Document):
    """`integrity.json`: three rounds of the same prompts, and what is made of them."""

    computed: tuple[Answer, ...]
    """Before the replay, the first time each prompt is seen."""
    device: tuple[Answer, ...]
    """Right after: from the device's cache."""
    restored: tuple[Answer, ...]
    """After the replay."""
    tolerance: float | None
    """In nats; None where the engine is too unsteady to be checked."""
    largest_difference: float
    """In nats, between the first and the last round."""
    cached_share: float | None
    """Prompt tokens of the last round that came from a cache; 0: everything was computed anew, nothing was tested."""
    changed: tuple[int, ...]
    """Numbers of the prompts that were answered differently."""

    @property
    def blind(self) -> bool:
        """Tell whether different prompts are answered alike, so that KV blocks of another prompt would not show.

        Seen with the weights that vLLM's `--load-format dummy` draws: every token is as likely as every other.
        """
        pairs = combinations(self.computed, 2)
        return self.tolerance is not None and all(difference(one, other) <= self.tolerance for one, other in pairs)


def prompts() -> tuple[str, ...]:
    """Return the probe prompts: the same in every arm, and unlike anything in a replayed session."""
    made = []
    for number in range(PROMPTS):
        drawn = random.Random(number)  # noqa: S311 - a fixed text, not a secret
        text = " ".join(drawn.choice(_WORDS) for _ in range(WORDS))
        made.append(f"Probe {number}. {text}. Go on with the list:")
    return tuple(made)


def ask_before(attempt: Attempt) -> tuple[tuple[Answer, ...], tuple[Answer, ...]] | str:
    """Ask each prompt twice in a row; return both rounds, or why this engine cannot be asked."""
    computed: list[Answer] = []
    device: list[Answer] = []
    for prompt in prompts():
        for answers in (computed, device):
            answer = ask_one(attempt, prompt)
            if isinstance(answer, str):
                return answer
            answers.append(answer)
    return tuple(computed), tuple(device)


def ask_after(attempt: Attempt) -> tuple[Answer, ...] | str:
    """Ask each prompt once more."""
    answers = []
    for prompt in prompts():
        answer = ask_one(attempt, prompt)
        if isinstance(answer, str):
            return answer
        answers.append(answer)
    return tuple(answers)


def ask_one(attempt: Attempt, prompt: str) -> Answer | str:
    """Ask one prompt greedily, with log-probabilities; return the answer, or why there is none."""
    body = {
        "model": attempt.point.plan.served_model_name,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "seed": 0,
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 2,
    }
    return read_answer(endpoints.ask(attempt.url(attempt.point.plan.api_port, "/v1/chat/completions"), body))


def read_answer(reply: Any) -> Answer | str:
    """Return the tokens of a chat completion with log-probabilities, or why there are none."""
    if not isinstance(reply, dict):
        return f"the server answered {str(reply)[:200]}"
    try:
        entries = reply["choices"][0]["logprobs"]["content"]
        usage = reply.get("usage") or {}
        tokens = tuple(
            Token(text=entry["token"], logprob=float(entry["logprob"]), runner_up=_runner_up(entry))
            for entry in entries
        )
        details = usage.get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens")
        return Answer(tokens=tokens, prompt_tokens=usage.get("prompt_tokens"), cached_tokens=cached)
    except (KeyError, IndexError, TypeError, ValueError):
        return "the server's answer holds no log-probabilities"


def _runner_up(entry: dict[str, Any]) -> float | None:
    others = sorted((float(other["logprob"]) for other in entry.get("top_logprobs") or []), reverse=True)
    return others[1] if len(others) > 1 else None


def difference(first: Answer, second: Answer) -> float:
    """Return the largest difference of log-probabilities in nats, up to the first token that differs.

    There the first answer's lead over its runner-up counts: near 0 for a tie that rounding decided, large for another
    answer. What follows comes after another text and compares with nothing.
    """
    largest = 0.0
    for one, other in zip(first.tokens, second.tokens, strict=False):
        largest = max(largest, abs(one.logprob - other.logprob))
        if one.text != other.text:
            lead = 0.0 if one.runner_up is None else one.logprob - one.runner_up
            return max(largest, lead)
    if len(first.tokens) != len(second.tokens):
        return max(largest, CEILING * 2)
    return largest


def judge(computed: tuple[Answer, ...], device: tuple[Answer, ...], restored: tuple[Answer, ...]) -> Integrity:
    """Compare the last round with the first two; a prompt has changed if it is far from both of them."""
    normal = max((difference(one, other) for one, other in zip(computed, device, strict=True)), default=0.0)
    tolerance = max(FLOOR, FACTOR * normal)
    steady = tolerance <= CEILING
    far = [
        min(difference(first, last), difference(second, last))
        for first, second, last in zip(computed, device, restored, strict=True)
    ]
    known = [(answer.cached_tokens, answer.prompt_tokens) for answer in restored]
    total = sum(whole for cached, whole in known if cached is not None and whole is not None)
    cached_tokens = sum(cached for cached, whole in known if cached is not None and whole is not None)
    return Integrity(
        schema_version=Integrity.SCHEMA_VERSION,
        computed=computed,
        device=device,
        restored=restored,
        tolerance=tolerance if steady else None,
        largest_difference=max(far, default=0.0),
        cached_share=cached_tokens / total if total else None,
        changed=tuple(i for i, one in enumerate(far) if one > tolerance) if steady else (),
    )


def finding(seen: Integrity) -> Finding | None:
    """Return the finding of a run whose answers changed, or None."""
    if not seen.changed:
        return None
    return Finding(
        code=Reason.KV_INTEGRITY,
        detail=f"{len(seen.changed)} of {len(seen.restored)} probe prompts were answered differently after the replay: "
        f"log-probabilities differ by {seen.largest_difference:.3g} nats, {seen.tolerance:.3g} is normal in this run",
    )


def settled_length(answer: Answer, tolerance: float) -> int:
    """Return how many tokens of an answer rounding cannot change."""
    for i, token in enumerate(answer.tokens):
        if token.runner_up is None or token.logprob - token.runner_up <= tolerance:
            return i
    return len(answer.tokens)


def write(folder: Path, seen: Integrity) -> None:
    """Write `integrity.json`, and the settled starts of the answers as `probes.before.json` and `probes.after.json`."""
    seen.write(folder / "integrity.json")
    if seen.tolerance is None:
        return
    lengths = [settled_length(answer, seen.tolerance) for answer in seen.computed]
    for moment, answers in (("before", seen.computed), ("after", seen.restored)):
        listed = [
            {"prompt": prompt, "answer": "".join(token.text for token in answer.tokens[:length])}
            for prompt, answer, length in zip(prompts(), answers, lengths, strict=True)
        ]
        write_atomic(folder / f"probes.{moment}.json", json.dumps(listed, indent=1).encode())


def in_words(seen: Integrity) -> str:
    """Return what was found, in a sentence."""
    if seen.tolerance is None:
        return f"not checked: equal prompts differ by more than {CEILING / FACTOR:g} nats even without a replay"
    if seen.blind and not seen.changed:
        return "not checked: this model answers different prompts alike, so wrong KV blocks would not show"
    if seen.cached_share is not None and seen.cached_share <= TEMPLATE_SHARE and not seen.changed:
        return "not checked: none of the prompts came from a cache when they were asked again"
    share = "an unknown share" if seen.cached_share is None else f"{seen.cached_share:.0%}"
    return (
        f"{len(seen.changed)} of {len(seen.restored)} answers changed (at most {seen.largest_difference:.2g} nats "
        f"apart, {seen.tolerance:.2g} is normal here; {share} of their prompt tokens came from a cache)"
    )
