"""What an entry or a search space gets wrong although it is well-formed, before a GPU hour is spent on it."""

import re
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path

from workflow.changelog import LoggedEntry
from workflow.contract import InputError, Strict
from workflow.rows import (
    SCENARIOS,
    FixedRow,
    MultiNodeRow,
    NotRunnable,
    PlannedRow,
    Row,
    concurrencies,
    grouped,
    recipe_key,
)
from workflow.searchspace import Component, Master, Runners, resolve_keys

AnyPlanned = PlannedRow | NotRunnable


class PlanCode(StrEnum):
    """What is wrong. The code is stable; `PlanFinding.found` says the particulars."""

    TAB = "tab"
    CARRIAGE_RETURN = "carriage_return"
    UNFINISHED = "marked_as_unfinished"
    PLACEHOLDER_LINK = "placeholder_link"
    COPIED_LINK = "copied_link"
    NOTHING_SELECTED = "nothing_selected"
    DESCRIBED_CONCURRENCY = "described_concurrency_differs"
    DESCRIBED_VERSION = "described_version_differs"
    DESCRIBED_BACKEND = "described_backend_differs"
    DESCRIBED_IMAGE = "described_image_differs"
    UNCHECKABLE_CLAIM = "claim_that_nothing_checks"
    SAME_POINT = "same_point_twice"
    SAME_NAME = "one_name_for_two_points"
    NO_HARDWARE = "runner_without_hardware"
    BUDGET_ABOVE_NODE = "budget_above_node"


EXPLAINED = {
    PlanCode.TAB: "a tab in a YAML file; InferenceX's gate refuses it",
    PlanCode.CARRIAGE_RETURN: "Windows line ends in a YAML file; InferenceX's gate refuses them",
    PlanCode.UNFINISHED: "an entry that is marked WIP, DNM or DO NOT MERGE",
    PlanCode.PLACEHOLDER_LINK: "a pr-link that is not the address of a pull request",
    PlanCode.COPIED_LINK: "a pr-link that an earlier entry has too, for other config keys",
    PlanCode.NOTHING_SELECTED: "an entry whose keys and scenarios select no line of a search space",
    PlanCode.DESCRIBED_CONCURRENCY: "a concurrency in the description that the search space does not measure",
    PlanCode.DESCRIBED_VERSION: "a version in the description that the search space does not declare",
    PlanCode.DESCRIBED_BACKEND: "a backend in the description that the search space does not have",
    PlanCode.DESCRIBED_IMAGE: "an image in the description that the search space does not use",
    PlanCode.UNCHECKABLE_CLAIM: "a claim that a script takes a version from the search space",
    PlanCode.SAME_POINT: "two lines, or one line twice, that expand to one point",
    PlanCode.SAME_NAME: "two points of one key that InferenceX writes under one exp-name",
    PlanCode.NO_HARDWARE: "a runner without hardware facts",
    PlanCode.BUDGET_ABOVE_NODE: "a host budget above what the node has for its GPUs",
}
"""What each code finds, for docs/write-an-entry.md."""


def codes_table() -> str:
    """Return the table of all codes in Markdown."""
    rows = [f"| `{code}` | {EXPLAINED[code]} |" for code in PlanCode]
    return "\n".join(["| code | finds |", "|---|---|", *rows, ""])


class PlanFinding(Strict):
    """One thing to mend: a warning, or an error with `strict: true`."""

    code: PlanCode
    file: str
    line: int
    found: str
    do: str

    @property
    def message(self) -> str:
        """Return the finding in one line."""
        return f"{self.file}:{self.line}: {self.found}; {self.do} [{self.code}]"


def refuse(findings: Iterable[PlanFinding]) -> None:
    """Raise InputError with all findings, a line each, if there is one; for `strict: true`."""
    errors = [InputError(item.message) for item in findings]
    if errors:
        raise InputError.join(errors)


def lint(
    entries: Sequence[LoggedEntry],
    master: Master,
    runners: Runners,
    rows: Sequence[AnyPlanned],
    log: Sequence[LoggedEntry] = (),
) -> list[PlanFinding]:
    """Return what is wrong with entries and with the rows that they ask for, measured here or not.

    `log` is the whole changelog, for links that were copied from an older entry. A description is only held against
    numbers and names that it states in the way people state what is measured: prose about what was replaced, dropped
    or seen elsewhere is left alone.
    """
    findings: list[PlanFinding] = []
    for entry in entries:
        asked = _asked(entry, master, rows)
        findings += _unfinished(entry)
        findings += _link(entry, [*log, *entries])
        findings += _nothing(entry, master)
        if asked:
            findings += _descriptions(entry, asked)
    findings += _same_point(rows)
    findings += _same_name(rows)
    findings += _hardware(rows, master, runners)
    return findings


def lint_text(path: Path, text: bytes) -> list[PlanFinding]:
    """Return what InferenceX's gate refuses in a YAML file though YAML itself allows it: tabs, carriage returns."""
    findings = []
    for number, line in enumerate(text.split(b"\n"), 1):
        if b"\t" in line:
            findings.append(_finding(PlanCode.TAB, path, number, "tab", "write spaces"))
        if b"\r" in line:
            found = "carriage return"
            findings.append(_finding(PlanCode.CARRIAGE_RETURN, path, number, found, "save with Unix line ends"))
            break  # a file has them on every line or on none; one finding says it
    return findings


def _finding(code: PlanCode, file: Path, line: int, found: str, do: str) -> PlanFinding:
    return PlanFinding(code=code, file=str(file), line=line, found=found, do=do)


# --------------------------------------------------------------------------------------------------------- the entry
# Patterns are texts, which `re` compiles and remembers on first use: most runs of the command need none of them.
_UNFINISHED = r"(?i)\bDNM\b|\bWIP\b|\[wip\]|\bdo[ _-]not[ _-]merge\b"
_PULL_REQUEST = r"https://[^/\s]+/[^/\s]+(?:/[^/\s]+)+/(?:pull|pulls|merge_requests)/[1-9]\d*"


def _bullets(entry: LoggedEntry) -> list[tuple[int, str]]:
    """Return each line of the description with the line of the file where it begins."""
    texts = entry.entry.description
    lines = entry.description_lines or (entry.line,) * len(texts)
    return list(zip(lines, texts, strict=True))


def _unfinished(entry: LoggedEntry) -> Iterator[PlanFinding]:
    for line, text in [*_bullets(entry), (entry.line, " ".join(entry.entry.config_keys))]:
        if marker := re.search(_UNFINISHED, text):
            found, do = f"the entry is marked {marker[0]!r}", "measure it once it is finished, or remove the mark"
            yield _finding(PlanCode.UNFINISHED, entry.file, line, found, do)


def _link(entry: LoggedEntry, others: Sequence[LoggedEntry]) -> Iterator[PlanFinding]:
    link = entry.entry.pr_link
    line = entry.link_line if entry.description_lines else entry.line
    if not re.fullmatch(_PULL_REQUEST, link):
        found, do = (
            f"pr-link {link!r} is not the address of a pull request",
            "write https://<host>/<owner>/<repository>/pull/<number>",
        )
        yield _finding(PlanCode.PLACEHOLDER_LINK, entry.file, line, found, do)
        return
    for other in others:
        keys = set(entry.entry.config_keys) & set(other.entry.config_keys)
        if other.index < entry.index and other.entry.pr_link == link and not keys:
            found = f"pr-link {link} is also that of entry {other.index} (line {other.line}), for other config keys"
            do = "write this entry's own link; if one pull request has both, name all keys in one entry"
            yield _finding(PlanCode.COPIED_LINK, entry.file, line, found, do)
            return


def _nothing(entry: LoggedEntry, master: Master) -> Iterator[PlanFinding]:
    wanted = entry.entry.scenario_type or SCENARIOS
    try:
        keys = resolve_keys(entry, master)
    except InputError as error:
        do = "write a config key of the search spaces, or a pattern that matches one"
        yield _finding(PlanCode.NOTHING_SELECTED, entry.file, entry.line, error.found, do)
        return
    had = {kind for key in keys for kind, _, _ in master.search_space(key).lines()}
    if not had & set(wanted):
        found = f"the entry wants {', '.join(wanted)}, and its config keys have only {', '.join(sorted(had))}"
        do = "mend scenario-type or config-keys"
        yield _finding(PlanCode.NOTHING_SELECTED, entry.file, entry.line, found, do)


# --------------------------------------------------------------------------------------------------- the description
# How people call backends in prose. A row's backend that is not here is looked for under its own name.
_ALIASES = {
    "lmcache": r"LMCache",
    "mooncake": r"Mooncake",
    "hicache": r"HiCache",
    "vllm-simple": r"vllm-simple|SimpleCPU(?:Offload(?:ing)?)?(?:Connector)?",
    "vllm-native": r"vllm-native",
}
_FRAMEWORKS = {"vllm": r"vLLM", "sglang": r"SGLang", "trt": r"(?:TensorRT|TRT)-LLM"}
_RESIDENT = r"(?i)\bGPU[- ]resident\b|\bresident\b|\bno (?:KV )?offload|\bkvnone\b|\bHBM-only\b"

# A bullet with one of these tells a history or compares with something else: its numbers are not the plan.
_HISTORY = (
    r"(?i)\b(?:replac|drop|remov|delet|instead|previous|prior|former|no longer|retir|exclud|skip|cap|stop|trim|from\b"
    r"|fail|crash|unlike|versus|vs\b|beyond|past\b|until|sibling|validated|measured|tried|tested|observ|characteri"
    r"|was\b|were\b|legacy|published|deprecat|without|not\b|except)"
)
# With these a backend is named beside what is measured.
_BESIDE = r"(?i)\b(?:same|mirror|existing|like|wired|off\b|only|switch|chang|updat|bump)"
_ITEM = r"c?\d+(?:\s?(?:-|\u2013|through|to)\s?c?\d+)?"
_LIST = rf"{_ITEM}(?:(?:\s*,\s*and\s+|\s*[,/]\s*|\s+and\s+){_ITEM})*"
_CONCURRENCY = (
    rf"\b[Cc]onc(?:urrenc(?:y|ies)|s)?(?:[- ](?:list|points?))?\s*[:=]?\s*[\[(]?\s*"
    rf"(?P<a>(?>{_LIST}))(?![\w%\u00d7]|\.\d|-\w)"
    rf"|(?<![\w.#-])(?P<b>(?>c\d+(?:\s?[/,-]\s?c?\d+)*))(?![\w%\u00d7-]|\.\d)"
)
_VERSION = (
    r"[ -]?(?:==|=|@|version )?\s?v?(?P<version>\d+\.\d+(?:\.\d+)*(?:[._-]?(?:rc|post|dev|a|b)\d*)*)(?![\w.]*[\w])"
)
_PLUMBING = (
    r"\bKV_OFFLOAD_BACKEND_METADATA\b|\bROUTER_METADATA\b"
    r"|\bversion\b[^.;]*\b(?:consumed|read|plumbed|threaded|passed)\b[^.;]*\b(?:script|recipe|launcher)\b"
)
_IMAGE = r"(?<![\w./-])(?P<name>[a-z0-9][\w.-]*(?:/[\w.-]+)+):(?P<tag>[\w.-]*\w)"


def _asked(entry: LoggedEntry, master: Master, rows: Sequence[AnyPlanned]) -> list[AnyPlanned]:
    """Return the rows of an entry's keys and scenarios; an earlier entry may have been the one that expanded them."""
    try:
        keys = set(resolve_keys(entry, master))
    except InputError:
        return []  # reported as NOTHING_SELECTED
    wanted = entry.entry.scenario_type or SCENARIOS
    return [
        item
        for item in rows
        if item.config_key in keys
        and ("agentic-coding" if isinstance(item.row, Row | MultiNodeRow) else "fixed-seq-len") in wanted
    ]


def _descriptions(entry: LoggedEntry, rows: Sequence[AnyPlanned]) -> Iterator[PlanFinding]:
    for line, text in _bullets(entry):
        yield from _images(entry, line, text, rows)
        yield from _plumbing(entry, line, text)
        yield from _versions(entry, line, text, rows)
        if not re.search(_HISTORY, text) and not re.search(_BESIDE, text):
            yield from _backends(entry, line, text, rows)
        # Each clause is held against the arms that it names.
        for clause in re.split(r"(?<=[.;])\s+", text):
            if not re.search(_HISTORY, _without_brackets(clause)):
                yield from _concurrencies(entry, line, clause, rows)


def _without_brackets(text: str) -> str:
    return re.sub(r"\([^()]*\)", "", text)


def _concurrencies(entry: LoggedEntry, line: int, text: str, rows: Sequence[AnyPlanned]) -> Iterator[PlanFinding]:
    arms = _named_arms(text, rows)
    if arms == {"none"}:
        arms = set()  # "resident" alone is said of weights and pools too
    meant = [item for item in rows if _arm(item) in arms] or list(rows)
    planned = sorted({conc for item in meant for conc in concurrencies(item.row)})
    for match in re.finditer(_CONCURRENCY, text):
        said = match["a"] or match["b"]
        strange = [number for number in _numbers(said) if number not in planned]
        if strange:
            has = ", ".join(str(conc) for conc in planned)
            whose = f" for {', '.join(sorted(arms))}" if arms and len(meant) < len(rows) else ""
            found = f"the description says conc {said}{whose}, and the search space has [{has}]"
            do = f"nothing measures {', '.join(map(str, strange))}: mend the description or the search space"
            yield _finding(PlanCode.DESCRIBED_CONCURRENCY, entry.file, line, found, do)


def _numbers(said: str) -> list[int]:
    """Return the concurrencies that a text states; of a range only its ends are stated."""
    return [int(number) for number in re.findall(r"\d+", said)]


def _versions(entry: LoggedEntry, line: int, text: str, rows: Sequence[AnyPlanned]) -> Iterator[PlanFinding]:
    for component, field in _components(rows):
        said = _said_versions(_ALIASES.get(component.name, re.escape(component.name)), text)
        if said and component.version is None:
            found = f"the description says {component.name} {said[0]}, and the search space declares no version"
            do = f"write {field}: {{name: {component.name}, version: {said[0]!r}}}: only then is it checked"
            yield _finding(PlanCode.DESCRIBED_VERSION, entry.file, line, found, do)
        elif said and component.version not in said:
            found = f"the description says {component.name} {said[0]}, and the search space {component.version}"
            yield _finding(
                PlanCode.DESCRIBED_VERSION, entry.file, line, found, f"mend the description or {field}.version"
            )
    images = {item.row.image for item in rows}
    for framework in sorted({item.row.framework.removeprefix("dynamo-") for item in rows} & _FRAMEWORKS.keys()):
        said = _said_versions(_FRAMEWORKS[framework], text)
        # A nightly's tag is a commit, which says nothing about the version.
        tagged = all(re.search(r":.*\d+\.\d+\.\d+", image) for image in images)
        if said and tagged and not any(version in image for version in said for image in images):
            found = f"the description says {framework} {said[0]}, and the image is {', '.join(sorted(images))}"
            yield _finding(PlanCode.DESCRIBED_VERSION, entry.file, line, found, "mend the description or image")


def _said_versions(name: str, text: str) -> list[str]:
    return [match["version"] for match in re.finditer(rf"\b(?:{name}){_VERSION}", text, re.IGNORECASE)]


def _components(rows: Sequence[AnyPlanned]) -> list[tuple[Component, str]]:
    """Return the backends and routers of rows, each once for each version, with the key that declares them."""
    found: dict[tuple[Component, str], None] = {}
    for item in rows:
        if item.row.router is not None:
            found[item.row.router, "router"] = None
        if isinstance(item.row, Row | MultiNodeRow) and item.row.kv_offload_backend is not None:
            found[item.row.kv_offload_backend, "kv-offload-backend"] = None
    names = grouped(list(found), lambda pair: pair[0].name)
    # Two versions of one component are a comparison of versions; a description may name either.
    return [pairs[0] for pairs in names.values() if len(pairs) == 1]


def _backends(entry: LoggedEntry, line: int, text: str, rows: Sequence[AnyPlanned]) -> Iterator[PlanFinding]:
    have = {_arm(item) for item in rows}
    # Fixed-sequence rows declare no backend, so that nothing can contradict them.
    if any(isinstance(item.row, Row | MultiNodeRow) for item in rows):
        for name in sorted(_named_arms(text, rows) - have - {"none"}):
            found = f"the description speaks of {name}, and the search space has only {', '.join(sorted(have))}"
            do = "mend the description, or add the arm"
            yield _finding(PlanCode.DESCRIBED_BACKEND, entry.file, line, found, do)


def _images(entry: LoggedEntry, line: int, text: str, rows: Sequence[AnyPlanned]) -> Iterator[PlanFinding]:
    used = {item.row.image.replace("#", "/") for item in rows}
    said = [match[0] for match in re.finditer(_IMAGE, text)]
    same = [image for image in said if any(image.rpartition(":")[0] == name.rpartition(":")[0] for name in used)]
    # "from repository:old to new" names the new tag alone.
    named = any(image in name or name.rpartition(":")[2] in text for image in same for name in used)
    if same and not named:
        found = f"the description says image {same[-1]}, and the search space {', '.join(sorted(used))}"
        yield _finding(PlanCode.DESCRIBED_IMAGE, entry.file, line, found, "mend the description or image")


def _plumbing(entry: LoggedEntry, line: int, text: str) -> Iterator[PlanFinding]:
    if claim := re.search(_PLUMBING, text):
        found = f"the description says that a script takes the version from the search space ({claim[0]!r})"
        do = "InferenceX hands it to the report only; here the version that served is compared with the declared one"
        yield _finding(PlanCode.UNCHECKABLE_CLAIM, entry.file, line, found, do)


def _named_arms(text: str, rows: Sequence[AnyPlanned]) -> set[str]:
    own = {_arm(item) for item in rows} - {"none", "native"} - _ALIASES.keys()
    names = {**_ALIASES, **{name: re.escape(name) for name in own}}
    found = {name for name, pattern in names.items() if re.search(rf"\b(?:{pattern})\b", text, re.IGNORECASE)}
    return found | ({"none"} if re.search(_RESIDENT, text) else set())


def _arm(item: AnyPlanned) -> str:
    backend = item.row.kv_offload_backend if isinstance(item.row, Row | MultiNodeRow) else None
    return backend.name if backend else "none"


# ---------------------------------------------------------------------------------------------------------- the rows
def _same_point(rows: Sequence[AnyPlanned]) -> Iterator[PlanFinding]:
    first: dict[object, AnyPlanned] = {}
    for item in rows:
        for conc in concurrencies(item.row):
            other = first.setdefault((recipe_key(item.row), conc), item)
            if other is not item or concurrencies(item.row).count(conc) > 1:
                found = f"conc {conc} of {item.config_key} is the same point as in {other.file}:{other.line}"
                yield _finding(PlanCode.SAME_POINT, item.file, item.line, found, "remove one of the two")


def _same_name(rows: Sequence[AnyPlanned]) -> Iterator[PlanFinding]:
    """InferenceX names a result by exp-name, so that of two points with one name the second overwrites the first."""
    agentic = [item for item in rows if isinstance(item.row, Row | MultiNodeRow)]
    reported: set[tuple[int, int]] = set()
    for items in grouped(agentic, lambda item: (item.file, item.config_key, item.row.exp_name)).values():
        for item in items[1:]:
            lines = (items[0].line, item.line)
            if recipe_key(item.row) != recipe_key(items[0].row) and lines not in reported:
                reported.add(lines)
                found = f"{item.row.exp_name} names a point of line {lines[0]} too, which is served in another way"
                do = "keep the concurrencies of the two lines apart where InferenceX reads them; here each has its id"
                yield _finding(PlanCode.SAME_NAME, item.file, item.line, found, do)


def _hardware(rows: Sequence[AnyPlanned], master: Master, runners: Runners) -> Iterator[PlanFinding]:
    reported: set[tuple[str, object]] = set()
    for item in rows:
        if isinstance(item.row, FixedRow):
            continue
        hardware = runners.hardware.get(item.row.runner)
        if hardware is None:
            if (item.config_key, item.row.runner) not in reported and isinstance(item.row, Row):
                reported.add((item.config_key, item.row.runner))
                found = f"runner {item.row.runner!r} of {item.config_key} has no hardware facts in runners.yaml"
                line = master.line(item.config_key, "runner")
                do = f"add available-cpu-dram-mib and gpus-per-node; known: {', '.join(sorted(runners.hardware))}"
                yield _finding(PlanCode.NO_HARDWARE, item.file, line, found, do)
        elif isinstance(item.row, Row) and (item.config_key, item.line) not in reported:
            node_bytes = hardware.available_cpu_dram_mib * 1_048_576
            share = item.row.gpus / hardware.gpus_per_node
            if item.row.total_cpu_dram_gb * 1e9 > node_bytes * min(share, 1.0):
                reported.add((item.config_key, item.line))
                found = (
                    f"budget of {item.row.total_cpu_dram_gb} GB for {item.row.gpus} GPUs on a node of "
                    f"{hardware.gpus_per_node} GPUs and {node_bytes / 1e9:.0f} GB"
                )
                do = "lower dram-utilization or mend runners.yaml"
                yield _finding(PlanCode.BUDGET_ABOVE_NODE, item.file, item.line, found, do)
