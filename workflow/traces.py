"""Sessions of coding agents in Weka layout: generate them, scale them down, check and prepare a set, know its ceiling.

A trace is one JSON file a session: token counts, timings and the hash ids of the prompt's blocks, no text. Equal ids
stand for equal text, so a shared prefix is a shared run of leading ids. The replay client makes up the text.
"""

import bisect
import hashlib
import json
import math
import random
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError

from workflow.config import GeneratedTraces, RecordedTraces, TraceFilter, TraceSet
from workflow.contract import Document, InputError, file_sha256, write_atomic

GENERATOR = 1
"""Version of the generator: raise it when the same declaration gives other sessions, since it is part of a point."""

BLOCK_TOKENS = 64

QUANTILES = (0.05, 0.25, 0.50, 0.75, 0.95)
# Quantiles of 710 recorded coding-agent sessions with 49,334 requests (callanjfox/kv-cache-tester at 94f6046).
TURNS = (4, 18, 45, 94, 232)
FIRST_PROMPT_TOKENS = (13_048, 18_587, 24_522, 104_189, 378_386)
GROWTH_TOKENS = (154, 331, 655, 1_551, 6_162)
OUTPUT_TOKENS = (89, 137, 216, 429, 1_544)
THINK_TIME_S = (3.0, 6.0, 10.0, 33.0, 461.0)
API_TIME_S = (0.1, 3.9, 5.7, 9.6, 26.8)
SYSTEM_TOKENS = (1_573, 2_324, 2_773, 3_004, 4_333)
TOOL_TOKENS = (8_315, 10_659, 12_262, 12_589, 13_136)
COMPACTION_SHARE = 0.009
"""Share of turns whose prompt shrinks: the conversation is summarised, the system and tool prefix stays."""


class _Weka(BaseModel):
    # Not frozen and not strict: these files come from elsewhere and a count may be written as 3.0.
    model_config = ConfigDict(extra="forbid")


class Request(_Weka):
    """One request of a session."""

    t: float
    """Seconds since the start of the session (in a sub-agent: of the session, or of the sub-agent if smaller)."""
    type: Literal["n", "s"]
    model: str
    input_tokens: int = Field(alias="in")
    output_tokens: int = Field(alias="out")
    hash_ids: list[int]
    """One id per whole block of the prompt; a rest shorter than a block has none."""
    input_types: list[str]
    output_types: list[str]
    stop: str
    api_time: float | None = None
    think_time: float | None = None
    ttft: float | None = None


class SubAgent(_Weka):
    """A child session that the parent waits for."""

    t: float
    type: Literal["subagent"]
    agent_id: str
    subagent_type: str
    status: str
    requests: list[Request]
    models: list[str]
    # Null in recorded sessions where the sub-agent was cut off.
    duration_ms: int | None = None
    total_tokens: int | None = None
    tool_use_count: int | None = None
    tool_tokens: int = 0
    system_tokens: int = 0


def _kind(data: Any) -> str:
    kind = data.get("type") if isinstance(data, dict) else data.type
    return "subagent" if kind == "subagent" else "request"


_KIND = Discriminator(_kind)
"""Picks the model by `type`, so that an error speaks of the fields of that one alone."""


class Trace(_Weka):
    """One session."""

    id: str
    models: list[str]
    block_size: int
    hash_id_scope: Literal["local"]
    tool_tokens: int = 0
    system_tokens: int = 0
    requests: list[Annotated[Annotated[Request, Tag("request")] | Annotated[SubAgent, Tag("subagent")], _KIND]]
    totals: dict[str, Any] | None = None

    def all_requests(self) -> Iterator[Request]:
        """Yield the session's requests, those of sub-agents included, in file order."""
        for request in self.requests:
            if isinstance(request, SubAgent):
                yield from request.requests
            else:
                yield request

    def to_json(self) -> bytes:
        """Return the file's bytes; optional fields that are absent stay absent."""
        return json.dumps(self.model_dump(by_alias=True, exclude_none=True), separators=(",", ":")).encode()


class TraceManifest(Document):
    """What a prepared set holds."""

    name: str
    declaration: dict[str, Any]
    """The set as it was declared when it was prepared."""
    sessions: int
    requests: int
    prompt_tokens: int
    longest_prompt_tokens: int
    ceiling_share: float
    """Share of prompt blocks that an infinite cache per session would have; no tier can do better on a full replay."""
    content_sha256: str
    """Of the sorted `sha256  name` lines of the session files."""


# ----------------------------------------------------------------------------------------------- generate
def draw(rng: random.Random, values: tuple[float, ...]) -> float:
    """Draw from the distribution with these `QUANTILES`, log-linear between them; the tails beyond are cut off."""
    u = QUANTILES[0] + rng.random() * (QUANTILES[-1] - QUANTILES[0])
    i = min(bisect.bisect_right(QUANTILES, u), len(QUANTILES) - 1)
    share = (u - QUANTILES[i - 1]) / (QUANTILES[i] - QUANTILES[i - 1])
    return math.exp(math.log(values[i - 1]) * (1 - share) + math.log(values[i]) * share)


def draw_at_most(rng: random.Random, values: tuple[float, ...], limit: float) -> float:
    """Draw as `draw` does, given that the value is at most `limit`; raises InputError if none can be."""
    if limit < values[0]:
        raise InputError(
            f"prompt_tokens_max {limit:.0f} is below the shortest recorded first prompt", allowed=f">= {values[0]:.0f}"
        )
    while (value := draw(rng, values)) > limit:
        pass
    return value


class _Blocks:
    """Fresh hash ids of one session."""

    def __init__(self) -> None:
        self.last = 0

    def fresh(self, count: int) -> list[int]:
        first, self.last = self.last + 1, self.last + count
        return list(range(first, self.last + 1))


def generate(spec: GeneratedTraces) -> Iterator[Trace]:
    """Yield the sessions of a declared set, scaled; the same declaration gives the same sessions on every machine."""
    for index in range(spec.sessions):
        # A stream of its own for each session: asking for more sessions does not change the first ones.
        rng = random.Random(f"{spec.seed}-{index}")  # noqa: S311 - reproducible on purpose
        yield scale_trace(_session(rng, index, spec), spec.scale)


def _session(rng: random.Random, index: int, spec: GeneratedTraces) -> Trace:
    blocks = _Blocks()
    system, tool = round(draw(rng, SYSTEM_TOKENS)), round(draw(rng, TOOL_TOKENS))
    prefix = blocks.fresh((system + tool) // BLOCK_TOKENS)
    turns = max(2, min(spec.turns_max, round(draw(rng, TURNS))))
    # A first prompt holds at least the prefix and something to do.
    first = draw_at_most(rng, FIRST_PROMPT_TOKENS, spec.prompt_tokens_max)
    tokens = max(round(first), system + tool + BLOCK_TOKENS)
    ids = prefix + blocks.fresh(tokens // BLOCK_TOKENS - len(prefix))
    agent_turn = rng.randrange(1, turns) if rng.random() < spec.subagent_share else None
    requests: list[Request | SubAgent] = []
    t = 0.0
    for turn in range(turns):
        think = 0.0 if turn == 0 else min(draw(rng, THINK_TIME_S), spec.think_time_cap_s)
        request = _request(rng, t + think, tokens, ids, think=think, last=turn == turns - 1)
        requests.append(request)
        t = request.t + (request.api_time or 0.0)
        if turn == agent_turn:
            agent = _subagent(rng, t, blocks)
            requests.append(agent)
            t += (agent.duration_ms or 0) / 1000
        grown = tokens + max(round(draw(rng, GROWTH_TOKENS)), request.output_tokens)
        if rng.random() < COMPACTION_SHARE and len(ids) > 2 * len(prefix):
            kept = len(prefix) + max(1, int((len(ids) - len(prefix)) * rng.uniform(0.1, 0.6)))
            tokens, ids = kept * BLOCK_TOKENS, prefix + blocks.fresh(kept - len(prefix))
        elif grown > spec.prompt_tokens_max:
            request.stop = "end_turn"
            break
        else:
            tokens, ids = grown, ids + blocks.fresh(grown // BLOCK_TOKENS - len(ids))
    return Trace(
        id=f"generated_{index:04d}",
        models=["generated"],
        block_size=BLOCK_TOKENS,
        hash_id_scope="local",
        tool_tokens=tool,
        system_tokens=system,
        requests=requests,
    )


def _request(
    rng: random.Random, t: float, tokens: int, ids: list[int], *, think: float, last: bool, start: float = 0.0
) -> Request:
    return Request.model_validate(
        {
            "t": round(t - start, 3),
            "type": "n",
            "model": "generated",
            "in": tokens,
            "out": max(1, round(draw(rng, OUTPUT_TOKENS))),
            "hash_ids": list(ids),
            "input_types": ["text"] if t == start else ["tool_result"],
            "output_types": ["text"] if last else ["text", "tool_use"],
            "stop": "end_turn" if last else "tool_use",
            "api_time": round(draw(rng, API_TIME_S), 3),
            "think_time": round(think, 3),
        }
    )


def _subagent(rng: random.Random, t: float, blocks: _Blocks) -> SubAgent:
    """Return a short child session with a system and tool prefix of its own, as recorded explorers have."""
    system, tool = round(draw(rng, SYSTEM_TOKENS) / 3), round(draw(rng, TOOL_TOKENS) * 2 / 3)
    turns = rng.randint(2, 8)
    tokens = system + tool + round(draw(rng, GROWTH_TOKENS))
    ids = blocks.fresh(tokens // BLOCK_TOKENS)
    requests = []
    now = t
    for turn in range(turns):
        request = _request(rng, now, tokens, ids, think=0.0, last=turn == turns - 1, start=t)
        requests.append(request)
        now += request.api_time or 0.0
        grown = tokens + max(round(draw(rng, GROWTH_TOKENS)), request.output_tokens)
        tokens, ids = grown, ids + blocks.fresh(grown // BLOCK_TOKENS - len(ids))
    return SubAgent(
        t=round(t, 3),
        type="subagent",
        agent_id="agent_001",
        subagent_type="Explore",
        status="completed",
        requests=requests,
        models=["generated"],
        duration_ms=round((now - t) * 1000),
        total_tokens=sum(request.output_tokens for request in requests),
        tool_use_count=turns - 1,
        tool_tokens=tool,
        system_tokens=system,
    )


# -------------------------------------------------------------------------------------------------- scale
def scale_trace(trace: Trace, scale: int) -> Trace:
    """Return a trace with every token count and time divided by `scale`; hash ids, and so the sharing, stay.

    Raises InputError if the block size is not a multiple of `scale`: ids would stand for broken blocks.
    """
    if trace.block_size % scale:
        raise InputError(
            f"scale {scale} does not divide the block size {trace.block_size} of trace {trace.id}",
            allowed=", ".join(str(n) for n in range(1, trace.block_size + 1) if trace.block_size % n == 0),
        )
    return trace.model_copy(
        update={
            "block_size": trace.block_size // scale,
            "tool_tokens": trace.tool_tokens // scale,
            "system_tokens": trace.system_tokens // scale,
            "requests": [_scaled(request, scale) for request in trace.requests],
            "totals": None,
        }
    )


def _scaled(request: Request | SubAgent, scale: int) -> Request | SubAgent:
    if isinstance(request, SubAgent):
        children = [_scaled_request(child, scale) for child in request.requests]
        return request.model_copy(
            update={
                "t": request.t / scale,
                "requests": children,
                "duration_ms": None if request.duration_ms is None else round(request.duration_ms / scale),
                "total_tokens": None if request.total_tokens is None else request.total_tokens // scale,
                "tool_tokens": request.tool_tokens // scale,
                "system_tokens": request.system_tokens // scale,
            }
        )
    return _scaled_request(request, scale)


def _scaled_request(request: Request, scale: int) -> Request:
    times = {name: getattr(request, name) for name in ("api_time", "think_time", "ttft")}
    return request.model_copy(
        update={
            "t": request.t / scale,
            "input_tokens": max(1, request.input_tokens // scale),
            "output_tokens": max(1, request.output_tokens // scale),
            **{name: value / scale for name, value in times.items() if value is not None},
        }
    )


# ----------------------------------------------------------------------------------------- read and prepare
def read_recorded(declared: RecordedTraces, base: Path) -> Iterator[Trace]:
    """Yield the sessions of a recorded set in the order of their file names, unfiltered and unscaled.

    Raises InputError: the path is missing, its sha256 is another one, it holds no trace, or a trace does not fit.
    """
    path = base / declared.path
    if not path.exists():
        raise InputError(
            f"recorded traces are not at {path}",
            key="path",
            do=f"fetch {declared.source} at {declared.revision} ({declared.licence}) and put it there",
        )
    found = folder_sha256(path) if path.is_dir() else file_sha256(path)
    if found != declared.sha256:
        raise InputError(f"{path} has sha256 {found}", key="sha256", allowed=declared.sha256)
    empty = True
    for name, data in _files(path):
        empty = False
        try:
            trace = Trace.model_validate_json(data)
        except ValidationError as error:
            issue = error.errors()[0]
            raise InputError(issue["msg"], file=name, key=".".join(str(part) for part in issue["loc"])) from None
        for wrong in contradictions(trace):
            raise InputError(wrong, file=name, do="write the session again: a replay of it would measure another load")
        yield trace
    if empty:
        raise InputError("no *.json trace here", file=path)


def contradictions(trace: Trace) -> Iterator[str]:
    """Yield what cannot be in a recorded session although each field of it is well-formed."""
    lines: list[Sequence[Request | SubAgent]] = [trace.requests]
    lines += [child.requests for child in trace.requests if isinstance(child, SubAgent)]
    for before, after in chain.from_iterable(pairwise(line) for line in lines):
        if after.t < before.t:
            yield f"a request of {trace.id} begins at {after.t:g} s, before the one in front of it"
    for i, request in enumerate(trace.all_requests()):
        ids, whole = request.hash_ids, request.input_tokens // trace.block_size
        if len(ids) != whole:
            yield f"request {i} of {trace.id} has {len(ids)} hash ids for {whole} whole blocks of its prompt"
        if len(set(ids)) < len(ids):
            yield f"request {i} of {trace.id} has a block twice in its prompt: its history was added to it once more"
    if not any(request.output_tokens > 0 for request in trace.all_requests()):
        yield f"no request of {trace.id} has an output token"


def _files(path: Path) -> Iterator[tuple[str, bytes]]:
    if path.is_dir():
        for file in sorted(path.glob("*.json")):
            yield str(file), file.read_bytes()
        return
    with tarfile.open(path) as archive:
        members = sorted((m for m in archive.getmembers() if m.name.endswith(".json")), key=lambda m: m.name)
        for member in members:
            stream = archive.extractfile(member)
            if stream is not None:
                yield f"{path}:{member.name}", stream.read()


def keep(traces: Iterable[Trace], rule: TraceFilter) -> Iterator[Trace]:
    """Yield the sessions that a filter lets through."""
    kept = 0
    for trace in traces:
        if rule.max_sessions is not None and kept >= rule.max_sessions:
            return
        longest = max(request.input_tokens for request in trace.all_requests())
        if rule.max_prompt_tokens is None or longest <= rule.max_prompt_tokens:
            kept += 1
            yield trace


def prepare(name: str, declared: TraceSet, base: Path, folder: Path) -> TraceManifest:
    """Write a set's sessions to `folder`/sessions/*.json and its manifest, last, to `folder`/trace_set.json.

    `base` is what a relative path of a recorded set starts at. Raises InputError as the readers do, or if the filter
    leaves nothing.
    """
    if isinstance(declared, GeneratedTraces):
        traces = generate(declared)
    else:
        recorded = keep(read_recorded(declared, base), declared.filter)
        traces = (scale_trace(trace, declared.scale) for trace in recorded)
    sessions = folder / "sessions"
    sessions.mkdir(parents=True, exist_ok=True)
    for stale in sessions.glob("*.json"):
        stale.unlink()
    written = []
    for trace in traces:
        write_atomic(sessions / f"{trace.id}.json", trace.to_json())
        written.append(trace)
    if not written:
        raise InputError(f"the filter of trace set {name!r} leaves no session", key=f"traces.{name}.filter")
    requests = [request for trace in written for request in trace.all_requests()]
    manifest = TraceManifest(
        schema_version=TraceManifest.SCHEMA_VERSION,
        name=name,
        declaration=declared.model_dump(mode="json"),
        sessions=len(written),
        requests=len(requests),
        prompt_tokens=sum(request.input_tokens for request in requests),
        longest_prompt_tokens=max(request.input_tokens for request in requests),
        ceiling_share=ceiling_share(written),
        content_sha256=folder_sha256(sessions),
    )
    manifest.write(folder / "trace_set.json")
    return manifest


def ceiling_share(traces: Iterable[Trace]) -> float:
    """Return the share of prompt blocks that a cache without limit, one per session, would hold on a full replay."""
    blocks = hits = 0
    for trace in traces:
        seen: set[int] = set()
        for request in trace.all_requests():
            hits += sum(block in seen for block in request.hash_ids)
            blocks += len(request.hash_ids)
            seen.update(request.hash_ids)
    return hits / blocks if blocks else 0.0


def folder_sha256(folder: Path) -> str:
    """Return the sha256 of the sorted `sha256  name` lines of a folder's *.json files."""
    lines = (f"{file_sha256(file)}  {file.name}\n" for file in sorted(folder.glob("*.json")))
    return hashlib.sha256("".join(lines).encode()).hexdigest()
