"""What configs/*.yaml may say, except the changelog and the search spaces, which have modules of their own."""

import copy
import json
from collections.abc import Mapping as AnyMapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from workflow import yamlfile
from workflow.contract import InputError, Strict

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(gt=0)]
PositiveSeconds = Annotated[float, Field(gt=0)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]


# ---------------------------------------------------------------------------------------------- config.yaml
class Described(Strict):
    """A part of config.yaml. Its docstrings are the descriptions of the schema, which editors show."""

    # Collecting them parses the module's source again for each class, so no other model does.
    model_config = ConfigDict(use_attribute_docstrings=True)


class ChangelogSelection(Described):
    """Which entries of the changelog are planned."""

    file: str = "configs/perf-changelog.yaml"
    """The append-only log, in InferenceX format."""
    base: str | None = None
    """A git revision: plan the entries that were added since then. Null: select by `entries`."""
    entries: str | int = "newest"
    """`newest`, `last N`, an index (0 is the oldest, -1 the newest), a pull request number as `#N`, or a pattern of
    config keys with `*`."""


class Replay(Described):
    """How recorded sessions are replayed against a server. The defaults are InferenceX's."""

    client: Literal["aiperf", "agentx-harness"] = "aiperf"
    """The replay client, in an environment of its own, `configs/environments/<client>.txt`: NVIDIA's, or the published
    fork that InferenceX measures with. Both replay the same sessions; only the fork has the extra warm-up."""
    client_version: str | None = None
    """Null: the version that the client's lock file pins. It is part of each point's identity, and checked on the node;
    another version than the pinned one is refused."""
    scenario: str = "inferencex-agentx-mvp"
    """The client's scenario: locks timing, cache busting and the order of sessions."""
    trace_set: Name = "coding-agent"
    """A name in configs/traces.yaml."""
    duration_s: PositiveSeconds = 3600.0
    """Length of the profiling window. Below 900 s the scenario marks the result as not fit for submission."""
    grace_s: Annotated[float, Field(ge=0)] = 30.0
    """How long requests that run at the end of the window may take to finish (the drain)."""
    warmup_grace_s: PositiveSeconds = 1800.0
    """How long the warm-up may take to drain."""
    request_timeout_s: PositiveSeconds = 600.0
    """One request's limit; the client's own default is six hours."""
    random_seed: int = 42
    """The same order of sessions in every arm."""
    start_ratio_min: Share = 0.25
    """Each lane starts at a turn drawn between these two shares of its session."""
    start_ratio_max: Share = 0.75
    idle_gap_cap_s: PositiveSeconds | None = None
    """Longest pause between two requests of one session; longer recorded ones are cut to it, in warm-up and window.
    Null: as recorded. Left out: 300 with agentx-harness, as InferenceX has it, and as recorded with aiperf. A few
    seconds are for short windows on borrowed hardware: recorded pauses pace the warm-up and leave few requests in a
    window of a minute; the client marks the result for it."""
    stop_above_error_share: Share = 0.10
    """The client stops a hopeless replay above this share of failed requests."""
    workers: Positive | None = None
    """Client worker processes; null leaves it to the client. 1 on a small machine."""
    warmup_requests_per_lane: Positive | None = None
    """agentx-harness only: requests of one token that each lane sends after its first prompt, without pauses, so that
    the caches are full when the window begins. Left out: 10. Null: none."""

    @model_validator(mode="after")
    def _ordered(self) -> "Replay":
        if self.start_ratio_min > self.start_ratio_max:
            raise ValueError("start_ratio_min must not be above start_ratio_max")
        return self


class Limits(Described):
    """When a measured point is not publishable. Changing a limit re-judges points, it never re-measures them."""

    error_share: Share = 0.01
    """Failed requests / all profiled requests. InferenceX allows 0.10."""
    window_share: Share = 0.9
    """Seconds with server activity / declared duration."""
    above_ceiling: Share = 0.01
    """How far the measured hit share may exceed the trace's ceiling."""


class Config(Described):
    """configs/config.yaml: what to run."""

    changelog: ChangelogSelection = ChangelogSelection()
    masters: tuple[str, ...] = ("configs/master/local.yaml",)
    """Search spaces, in InferenceX *-master.yaml format."""
    runners: str = "configs/runners.yaml"
    clusters: str = "configs/clusters.yaml"
    traces: str = "configs/traces.yaml"
    models: str = "configs/models.yaml"
    recipes: str = "configs/recipes"
    environments: str = "configs/environments"
    """Lock files of the client and of engines, `<name>.txt`."""
    replay: Replay = Replay()
    limits: Limits = Limits()
    repeats: Positive = 1
    """How often each point is measured. With 2 or more, the noise between runs is known and judged by."""
    share_server: bool = False
    """Points that differ by their concurrency or repeat only are measured in one allocation on one server, in turn,
    with all that it cached emptied and proven cold in between. They are other points than those with a server each."""
    equalize: bool = True
    """Where one arm of a group forces a derate, the whole group takes it; false prints the difference instead."""
    strict: bool = False
    """Planning warnings (a description that contradicts the config, a placeholder link) are errors."""
    partial: bool = False
    """Draw what has been measured and say what has not, instead of asking for every point."""


SHORT_NAMES = {"base": ("changelog", "base"), "entries": ("changelog", "entries")}
"""Names for `--config` -> section and key that they set."""


_WORDS: dict[str, bool | None] = {"true": True, "false": False, "null": None}


def load_config(files: list[Path], overrides: AnyMapping[str, Any]) -> Config:
    """Merge config files, later ones winning, and `--config` overrides.

    An override is a key of the file, `replay={duration_s: 60}`, or a short name of SHORT_NAMES, `entries=last 2`:
    Snakemake takes no dots in a name.

    Raises InputError for an unknown key or a value that is not allowed, with the file and line that said so.
    """
    merged: dict[str, Any] = {}
    for path in files:
        data = yamlfile.load(path) or {}
        if not isinstance(data, dict):
            raise InputError("the file is not a mapping", file=path, line=1, allowed="keys of the config")
        # Each file is checked alone first: after the merge nobody knows which line a value came from.
        yamlfile.validate(Config, data, path)
        _merge(merged, data)
    for key, given in overrides.items():
        section, name = SHORT_NAMES.get(key, (None, key))
        # Snakemake hands `partial=true` over as text.
        value = _WORDS.get(given, given) if isinstance(given, str) else given
        _merge(merged, {name: value} if section is None else {section: {name: value}})
    return yamlfile.validate(Config, merged, Path("--config"))


def _merge(into: dict[str, Any], other: AnyMapping[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, AnyMapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = copy.deepcopy(dict(value)) if isinstance(value, AnyMapping) else value


def config_schema() -> str:
    """Return the JSON schema of config.yaml, which editors read and a test compares with the committed file."""
    return json.dumps(Config.model_json_schema(), indent=1, sort_keys=True) + "\n"


# -------------------------------------------------------------------------------------------- clusters.yaml
SlurmName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
NodeList = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.,\[\]-]*$")]


class Slurm(Strict):
    """What to ask a cluster's Slurm for, beside what follows from the point."""

    partition: SlurmName
    account: SlurmName | None = None
    """Null: your default account."""
    qos: SlurmName | None = None
    constraint: str | None = None
    """Features that the nodes must have, as `sbatch --constraint` reads them."""
    gres: Annotated[str, Field(pattern=r"^gpu(:[A-Za-z0-9_.]+)?$")] | None = "gpu"
    """`gpu`, or `gpu:<type>` where the cluster has several; the count is the point's. Null: ask for no GPUs."""
    exclude: tuple[NodeList, ...] = ()
    """Nodes that must not be used."""
    exclusive: bool = False
    """Take whole nodes: a neighbour's copies over the same PCIe switches and its page cache are in the numbers."""
    time_limit_min: Positive
    """The longest job that the partition and the QOS allow. A point that needs more is refused when it is planned."""
    margin_min: Annotated[float, Field(gt=0)] = 15.0
    """Added to each job's expected time; a second attempt gets it twice."""
    base_memory_gb: Annotated[float, Field(gt=0)] = 64.0
    """Host memory of engine, client and Snakemake itself in GB, beside what an offload tier pins."""


class Cluster(Strict):
    """How a runner label of the search spaces maps to machines."""

    launcher: Literal["bare", "pyxis", "apptainer", "docker"]
    """How a service's command is started on a node: as it is, or in the image of its search space."""
    images: str | None = None
    """Folder that images are imported to, by digest; several checkouts may share it. Null: results/images. It has to
    be seen by the nodes."""
    scratch: str | None = None
    """Folder on a node's own disk that file tiers write to, in a folder for each attempt that is removed at its end.
    Null: the attempt's folder below results/, on a cluster the file system that all nodes share."""
    mounts: tuple[str, ...] = ()
    """Folders that a container sees besides the checkout, the attempt and the checkpoints; read only."""
    environments: tuple[Name, ...] = ()
    """Prepared environments (`configs/environments/<name>.txt`) that stand for the image where the launcher is `bare`:
    the first one that pins the engine and the backend's packages as the search space declares them is used."""
    cores_per_point: Positive | None = None
    """CPU cores that one point takes; null takes the whole machine, so that two points never disturb each other."""
    slurm: Slurm | None = None
    """How to ask for a node of the cluster; null: the cluster is the machine that Snakemake runs on."""
    model_paths: dict[str, str] = {}
    """Where the nodes keep a checkpoint: model name -> folder. A model that is not here is made by the workflow."""

    @model_validator(mode="after")
    def _cores_are_known(self) -> "Cluster":
        if self.slurm is not None and self.cores_per_point is None:
            raise ValueError("cores_per_point is needed with slurm: nobody here knows how many cores a node has")
        return self

    @field_validator("scratch")
    @classmethod
    def _one_place_on_every_node(cls, scratch: str | None) -> str | None:
        if scratch is not None and not scratch.startswith("/"):
            raise ValueError(f"found {scratch!r}: a folder on a node is named from / on")
        return scratch

    @model_validator(mode="after")
    def _one_source_of_packages(self) -> "Cluster":
        if self.environments and self.launcher != "bare":
            raise ValueError(f"environments go with launcher bare; with {self.launcher} the packages are the image's")
        return self


class Clusters(Strict):
    """configs/clusters.yaml."""

    clusters: dict[str, Cluster]

    @field_validator("clusters")
    @classmethod
    def _named(cls, clusters: dict[str, Cluster]) -> dict[str, Cluster]:
        for name in clusters:
            if not name.startswith("cluster:"):
                raise ValueError(f"{name!r} is not a runner label; a label is written cluster:<name>")
        return clusters


# ---------------------------------------------------------------------------------------------- models.yaml
WEIGHTS_STD = 0.02
"""Left out of declarations, which then stay what they were before there was a choice, and so do their points."""


class MadeModel(Strict):
    """A llama with random weights that the workflow writes itself, as GGUF: nothing is downloaded."""

    vocabulary_size: Annotated[int, Field(ge=512, le=65536)]
    hidden_size: Annotated[int, Field(multiple_of=64, gt=0)]
    """Width of the residual stream; heads are 64 wide."""
    layers: Positive
    kv_heads: Positive
    context_tokens: Positive
    seed: int
    weights_std: Annotated[float, Field(gt=0, exclude_if=lambda std: std == WEIGHTS_STD)] = WEIGHTS_STD
    """Standard deviation of the weights. At 0.06 attention is selective, and answers depend on single blocks of a
    prompt: 8 other words among 600 move log-probabilities by 0.1 to 0.4 nats, at 0.02 by 0.01 to 0.03 (32 layers of
    width 256)."""


class ShapedModel(Strict):
    """A llama's shape and a tokenizer, without weights: the engine draws them itself (vLLM's `--load-format dummy`)."""

    kind: Literal["shape"]
    vocabulary_size: Annotated[int, Field(ge=512, le=262144)]
    """Rows of the embedding. The tokenizer is padded to it: a random model also answers with its last tokens."""
    hidden_size: Positive
    intermediate_size: Positive
    layers: Positive
    heads: Positive
    kv_heads: Positive
    head_size: Positive
    context_tokens: Positive


def _model_kind(data: Any) -> str:
    kind = data.get("kind", "gguf") if isinstance(data, AnyMapping) else getattr(data, "kind", "gguf")
    return str(kind)


AnyModel = Annotated[
    Annotated[MadeModel, Tag("gguf")] | Annotated[ShapedModel, Tag("shape")], Discriminator(_model_kind)
]
"""Picked by `kind`, which a GGUF model does not have: declarations of before stay what they were, and their points."""


class Models(Strict):
    """configs/models.yaml: the models that the workflow makes."""

    models: dict[str, AnyModel]


# ---------------------------------------------------------------------------------------------- traces.yaml
class TraceFilter(Strict):
    """Which sessions of a set are replayed; sessions are taken in the order of their ids."""

    max_prompt_tokens: Positive | None = None
    """Leave out sessions with a longer prompt (before scaling)."""
    max_sessions: Positive | None = None


class GeneratedTraces(Strict):
    """A set that the seeded generator makes (workflow/traces.py)."""

    kind: Literal["generated"]
    seed: int
    sessions: Positive
    turns_max: Positive
    """Cap on the turns of one session; recorded sessions have 45 in the median and over 200 at the 95th percentile."""
    prompt_tokens_max: Positive
    """A session ends before its prompt would grow beyond this."""
    scale: Positive
    """All token counts and times are divided by this, so that a small engine can replay the set."""
    think_time_cap_s: PositiveSeconds
    """Longest pause between two turns, before scaling."""
    subagent_share: Share = 17 / 710
    """Share of sessions that start a sub-agent; as recorded by default."""


class RecordedTraces(Strict):
    """A set that was recorded elsewhere; it is checked against its hash and never fetched."""

    kind: Literal["recorded"]
    path: str
    """A folder of *.json traces in Weka layout, or a tar archive of them."""
    source: str
    revision: str
    licence: str
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """Of the archive, or of the folder's sorted `sha256  name` lines."""
    filter: TraceFilter = TraceFilter()
    scale: Positive = 1


TraceSet = Annotated[GeneratedTraces | RecordedTraces, Field(discriminator="kind")]


class TraceSets(Strict):
    """configs/traces.yaml."""

    traces: dict[Name, TraceSet]
