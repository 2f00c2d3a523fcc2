"""Search spaces -> matrix rows: one row for each job that InferenceX would start, in four kinds."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ConfigDict

from workflow.changelog import Kebab, LoggedEntry, ScenarioType
from workflow.contract import InputError
from workflow.searchspace import (
    AgenticEntry,
    AgenticScenario,
    Component,
    FixedScenario,
    Hardware,
    Master,
    Router,
    Runners,
    SearchSpace,
    SearchSpaceEntry,
    Worker,
    dram_budget_gb,
    gpus_on_one_node,
)

AGENTIC_DURATION_S = 3600
"""InferenceX's window of every agentic point; it is no setting there."""

CONTEXT_MARGIN_TOKENS = 256
"""InferenceX's max-model-len of a fixed-sequence point: input + output + this."""

SCENARIOS: tuple[ScenarioType, ...] = ("fixed-seq-len", "agentic-coding")
"""In the order in which InferenceX expands them."""


class BaseRow(Kebab):
    """What every job has. No defaults: a row states every value."""

    # Rows come from code by field name and from documents by either spelling.
    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    image: str
    model: str
    model_prefix: str
    precision: str
    framework: str
    runner: str
    spec_decoding: str
    router: Component | None
    exp_name: str


class Row(BaseRow):
    """One single-node agentic point as InferenceX hands it to a job."""

    tp: int
    pp: int
    dcp_size: int
    pcp_size: int
    ep: int
    dp_attn: bool
    conc: int
    kv_offloading: Literal["none", "dram"]
    kv_offload_backend: Component | None
    total_cpu_dram_gb: int
    """Host memory for the offload tier in decimal GB; 0 without offload."""
    duration: int
    """Seconds of the profiling window in InferenceX; ours is `replay.duration_s`."""
    scenario_type: Literal["agentic-coding"]

    @property
    def gpus(self) -> int:
        """Return the GPUs that one point takes."""
        return self.tp * self.pp * self.pcp_size


class FixedRow(BaseRow):
    """One single-node point with fixed input and output lengths."""

    isl: int
    osl: int
    tp: int
    pp: int
    dcp_size: int
    pcp_size: int
    ep: int
    dp_attn: bool
    conc: int
    max_model_len: int
    disagg: bool


class MultiNodeRow(BaseRow):
    """One allocation of several nodes that replays sessions; InferenceX gives each concurrency its own."""

    prefill: Worker
    decode: Worker
    conc: tuple[int, ...]
    kv_p2p_transfer: str | None
    kv_offloading: Literal["none", "dram"]
    kv_offload_backend: Component | None
    total_cpu_dram_gb: int
    duration: int
    disagg: bool
    scenario_type: Literal["agentic-coding"]


class MultiNodeFixedRow(BaseRow):
    """One allocation of several nodes with fixed lengths; all concurrencies of a line run in it one by one."""

    isl: int
    osl: int
    prefill: Worker
    decode: Worker
    conc: tuple[int, ...]
    kv_p2p_transfer: str | None
    max_model_len: int
    disagg: bool


AnyRow = Row | FixedRow | MultiNodeRow | MultiNodeFixedRow


@dataclass(frozen=True)
class PlacedRow:
    """A row of any kind with where its search space line stands."""

    row: AnyRow
    config_key: str
    file: Path
    line: int


@dataclass(frozen=True)
class PlannedRow:
    """A row with where it came from."""

    row: Row
    config_key: str
    file: Path
    line: int
    entry: LoggedEntry

    @property
    def origin(self) -> str:
        """Return the place in words, for messages."""
        return f"{self.file}:{self.line} ({self.config_key}, conc {self.row.conc})"


@dataclass(frozen=True)
class NotRunnable:
    """A row that an entry asks for and that this workflow does not measure yet."""

    row: AnyRow
    why: str
    config_key: str
    file: Path
    line: int
    entry: LoggedEntry

    @property
    def origin(self) -> str:
        """Return the place in words, for messages."""
        concs = ", ".join(str(conc) for conc in concurrencies(self.row))
        return f"{self.file}:{self.line} ({self.config_key}, conc {concs})"


def is_multi_node(row: AnyRow) -> bool:
    """Return whether a row takes several nodes."""
    return isinstance(row, MultiNodeRow | MultiNodeFixedRow)


def is_agentic(row: AnyRow) -> bool:
    """Return whether a row replays sessions."""
    return isinstance(row, Row | MultiNodeRow)


def concurrencies(row: AnyRow) -> tuple[int, ...]:
    """Return the concurrencies that a row measures."""
    return (row.conc,) if isinstance(row.conc, int) else row.conc


def rows_of(key: str, master: Master, runners: Runners, scenarios: Sequence[ScenarioType]) -> list[PlacedRow]:
    """Return the rows of one config key in InferenceX's order: fixed-seq-len first, then as the file has them.

    Raises InputError: a search space that does not fit its model, an offload tier on a runner without hardware facts,
    a topology that does not fit its nodes.
    """
    space = master.search_space(key)
    placed: list[PlacedRow] = []
    for kind, (i, j), entry in space.lines():
        if kind not in scenarios:
            continue
        file = master.places[key][0]
        line = master.line(key, "scenarios", kind, i, "search-space", j)
        try:
            if isinstance(entry, AgenticEntry):
                rows = _agentic_rows(space, space.scenarios.agentic_coding[i], entry, runners)
            else:
                rows = _fixed_rows(space, space.scenarios.fixed_seq_len[i], entry)
            placed += [PlacedRow(row, key, file, line) for row in rows]
        except _MisfitError as error:
            raise InputError(str(error), file=file, line=line, key=key) from None
    return placed


def added_rows(base: Sequence[PlacedRow], head: Sequence[PlacedRow]) -> list[PlacedRow]:
    """Return the points of an append-only entry: those of `head` that `base` does not have, in the order of `head`.

    Raises InputError where more than that changed, by InferenceX's rules: every row of the base is still there with
    every concurrency, something was added, and what was added continues a line of the base chart on the one image
    that all of that line was measured with.
    """
    before, after = _points(base), _points(head)

    def refusal(found: str, do: str = "drop append-only") -> InputError:
        first = next(iter([*head, *base]), None)
        file, key = (None, None) if first is None else (first.file, first.config_key)
        return InputError(f"append-only: {found}", file=file, key=key, do=do)

    if not before:
        raise refusal("the base has no row of this config key")
    for recipe, concs in before.items():
        if recipe not in after:
            raise refusal("a row of the base was changed or removed")
        if lost := sorted(concs - after[recipe]):
            raise refusal(f"concurrencies {lost} of the base are gone", "put them back")
    images: dict[tuple[Any, ...], set[str]] = {}
    for placed in base:
        images.setdefault(_charted_line(placed.row), set()).add(placed.row.image)
    added: list[PlacedRow] = []
    emitted: dict[tuple[Any, ...], set[int]] = {}
    for placed in head:
        recipe = recipe_key(placed.row)
        known = before.get(recipe, set()) | emitted.setdefault(recipe, set())
        fresh = tuple(dict.fromkeys(conc for conc in concurrencies(placed.row) if conc not in known))
        if not fresh:
            continue
        emitted[recipe].update(fresh)
        if images.get(_charted_line(placed.row)) != {placed.row.image}:
            found = f"append-only: conc {fresh[0]} continues no line that was measured on one image, {placed.row.image}"
            raise InputError(found, file=placed.file, line=placed.line, key=placed.config_key, do="drop append-only")
        row = placed.row if isinstance(placed.row, Row | FixedRow) else placed.row.model_copy(update={"conc": fresh})
        added.append(replace(placed, row=row))
    if not added:
        raise refusal("nothing was added", "add a concurrency or a row")
    return added


def recipe_key(row: AnyRow) -> tuple[Any, ...]:
    """Return what makes a row a row apart from its concurrency; the experiment's name follows from both."""
    return (type(row), *(value for name, value in row if name not in ("conc", "exp_name")))


def _points(rows: Sequence[PlacedRow]) -> dict[tuple[Any, ...], set[int]]:
    points: dict[tuple[Any, ...], set[int]] = {}
    for placed in rows:
        points.setdefault(recipe_key(placed.row), set()).update(concurrencies(placed.row))
    return points


def _charted_line(row: AnyRow) -> tuple[Any, ...]:
    """Return what InferenceX's charts draw as one line."""
    offload = isinstance(row, Row | MultiNodeRow) and row.kv_offloading != "none"
    served = (row.model, row.model_prefix, row.precision, row.framework, row.runner, offload)
    lengths = (row.isl, row.osl, row.spec_decoding) if isinstance(row, FixedRow | MultiNodeFixedRow) else None
    if isinstance(row, MultiNodeRow | MultiNodeFixedRow):
        return (*served, lengths, row.disagg, row.prefill.hardware, row.decode.hardware)
    return (*served, lengths, False, None, None)


class _MisfitError(Exception):
    """A line that is well-formed but does not fit the runner."""


def _served(space: SearchSpace, entry: SearchSpaceEntry) -> dict[str, Any]:
    names = ("image", "model", "model_prefix", "precision", "framework", "runner")
    router: Router | None = entry.router or space.router
    return {
        **{name: getattr(space, name) for name in names},
        "spec_decoding": entry.spec_decoding,
        "router": router,
    }


def _one_node(entry: SearchSpaceEntry) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in ("tp", "pp", "dcp_size", "pcp_size", "ep", "dp_attn")}


def _several_nodes(space: SearchSpace, entry: SearchSpaceEntry) -> dict[str, Any]:
    return {
        "prefill": entry.prefill,
        "decode": entry.decode,
        "disagg": space.disagg,
        "kv_p2p_transfer": entry.kv_p2p_transfer or space.kv_p2p_transfer,
    }


def _fixed_rows(space: SearchSpace, scenario: FixedScenario, entry: SearchSpaceEntry) -> Iterator[AnyRow]:
    lengths = sequence_lengths(scenario.isl, scenario.osl)
    common = {
        **_served(space, entry),
        "isl": scenario.isl,
        "osl": scenario.osl,
        "max_model_len": scenario.isl + scenario.osl + CONTEXT_MARGIN_TOKENS,
        "exp_name": f"{space.model_prefix}_{lengths}",
    }
    if space.multinode:
        yield MultiNodeFixedRow(**common, **_several_nodes(space, entry), conc=entry.concurrencies)
        return
    for conc in entry.concurrencies:
        yield FixedRow(**common, **_one_node(entry), conc=conc, disagg=False)


def _agentic_rows(
    space: SearchSpace, scenario: AgenticScenario, entry: AgenticEntry, runners: Runners
) -> Iterator[AnyRow]:
    offloading = entry.kv_offloading or "none"
    backend = entry.kv_offload_backend
    arm = f"kv{offloading}" if backend is None else f"kv{offloading}-{backend.name}"
    common = {
        **_served(space, entry),
        "kv_offloading": offloading,
        "kv_offload_backend": backend,
        "total_cpu_dram_gb": _budget_gb(space, scenario, entry, runners),
        "duration": AGENTIC_DURATION_S,
        "scenario_type": "agentic-coding",
    }
    for conc in entry.concurrencies:
        if entry.prefill is not None and entry.decode is not None:
            roles = f"{_role('p', entry.prefill)}_{_role('d', entry.decode)}"
            name = f"{space.model_prefix}_{roles}_conc{conc}" + ("" if backend is None else f"_{arm}")
            yield MultiNodeRow(**common, **_several_nodes(space, entry), conc=(conc,), exp_name=name)
        else:
            spec = "" if entry.spec_decoding == "none" else f"_spec-{entry.spec_decoding}"
            name = f"{space.model_prefix}_tp{entry.tp}_conc{conc}_{arm}{spec}"
            yield Row(**common, **_one_node(entry), conc=conc, exp_name=name)


def sequence_lengths(isl: int, osl: int) -> str:
    """Return the short name of a pair of lengths in tokens: 8k1k."""
    return {(1024, 1024): "1k1k", (8192, 1024): "8k1k"}.get((isl, osl), f"{isl}_{osl}")


def _role(letter: str, worker: Worker) -> str:
    experts = "" if worker.ep == 1 else f"ep{worker.ep}"
    return f"{letter}{worker.num_worker}x{worker.tp}{experts}{'dpa' if worker.dp_attn else ''}"


def _budget_gb(space: SearchSpace, scenario: AgenticScenario, entry: AgenticEntry, runners: Runners) -> int:
    """Return the host memory of one server process on one node in decimal GB; 0 without offload."""
    if entry.kv_offloading != "dram":
        return 0
    assert scenario.dram_utilization is not None
    hardware = runners.hardware.get(space.runner)
    if hardware is None:
        known = ", ".join(sorted(runners.hardware))
        raise _MisfitError(f"runner {space.runner!r} has no hardware facts in runners.yaml; known: {known}")
    return dram_budget_gb(hardware, scenario.dram_utilization, _gpus_of_budget(entry, hardware))


def _gpus_of_budget(entry: AgenticEntry, hardware: Hardware) -> int:
    if entry.prefill is not None:
        # Only the prefill role offloads.
        try:
            return gpus_on_one_node(entry.prefill, hardware.gpus_per_node)
        except ValueError as error:
            raise _MisfitError(str(error)) from None
    assert entry.tp is not None
    gpus = entry.tp * entry.pp * entry.pcp_size
    if gpus > hardware.gpus_per_node:
        raise _MisfitError(f"{gpus} GPUs on a node of {hardware.gpus_per_node}: the budget would exceed the node")
    return gpus


Grouped = TypeVar("Grouped")


def grouped(items: Sequence[Grouped], key: Callable[[Grouped], Any]) -> dict[Any, list[Grouped]]:
    """Return items in lists by key; lists and items keep their order."""
    groups: dict[Any, list[Grouped]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
