"""What it takes to serve a model: services, probes, proofs and the plan that holds them together.

Ports and paths of a node are placeholders in argv and env, `<port:engine>` and `<path:model>`, so that a plan is the
same on every node and can be hashed into the identity of a point.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, ValidationError

from workflow.contract import Finding, InputError, Reason, Strict
from workflow.matrix import Row

PLACEHOLDER = re.compile(r"<(port|path):([a-z0-9-]+)>")
_NEGATIVE = re.compile(r"-\d+(\.\d+)?")

Env = dict[str, str]
Argv = tuple[str, ...]


class Probe(Strict):
    """How a service shows that it is ready."""

    port: str
    """Name of the port placeholder that is asked."""
    path: str
    """HTTP path that answers 200 once the service is ready."""
    deadline_s: float
    """After this the service counts as never ready."""


class Service(Strict):
    """One process group of a point: the engine, a cache server, a router."""

    name: str
    argv: Argv
    """With placeholders; argv[0] is looked up in `environment`."""
    env: Env
    unset: tuple[str, ...] = ()
    """Variables that the command must not inherit: each would turn the arm into another one in silence."""
    environment: str | None
    """Prepared environment (`configs/environments/<name>.txt`) that the command runs in; None: the image's own."""
    probe: Probe


class Proof(Strict):
    """Something that must, or must not, be seen in a service's log for the arm to be what it claims."""

    name: str
    service: str
    pattern: str
    """Regular expression, searched line by line."""
    expected: bool
    """False: seeing it proves that this is not the arm that was declared."""
    says: str
    """What it proves, for the report."""
    by_use: bool = False
    """Only a workload that needs the tier can show it."""

    def unmet(self, arm: str) -> Finding:
        """Return what it means that this was not seen to hold."""
        code = Reason.OFFLOAD_IN_CONTROL if arm == "none" else Reason.OFFLOAD_NOT_PROVEN
        return Finding(code=code, detail=f"not seen to hold: {self.says} ({self.name})")


class VersionProbe(Strict):
    """Where the version that really serves is read back from."""

    component: str
    service: str
    pattern: str
    """Regular expression with a group named `version`, searched line by line in the service's log."""
    declared: str | None
    """The version that the search space asks for; None only records what was found."""


class ConfigFile(Strict):
    """A file that is written before anything is started."""

    path: str
    """Name of the path placeholder that stands for it."""
    filename: str
    text: str
    """With placeholders, like argv."""


class Blocker(Strict):
    """Why a plan is rendered but must not be started."""

    code: str
    says: str


class CacheFacts(Strict):
    """What backends have to know about a model's KV cache as its recipe serves it."""

    block_tokens: tuple[int, ...] = ()
    """Tokens per block of every KV group, as the engine prints them; empty: not known."""
    linear_state: bool = False
    """Recurrent state (Mamba, linear attention) beside the paged KV."""
    host_reserve_gib: float = 0.0
    """Host memory that serving the model takes out of the budget: checkpoint pages, weights offloaded to the host."""


FILE_TIER = "kv-tier"
"""Scratch folder of a tier on a file system."""


class Emptying(Strict):
    """How caches are emptied short of a restart."""

    posts: tuple[tuple[str, str], ...] = ()
    """(port placeholder, path) of the HTTP endpoints that are told to, in this order."""
    folders: tuple[str, ...] = ()
    """Scratch folders whose files are removed after that."""
    env: Env = {}
    """Variables without which the engine cannot be told."""

    def then(self, other: "Emptying") -> "Emptying":
        """Return both, this one first."""
        return Emptying(
            posts=(*self.posts, *other.posts),
            folders=(*self.folders, *other.folders),
            env={**self.env, **other.env},
        )


class Arm(Strict):
    """What one backend changes in a serve command, and nothing else may."""

    backend: str
    argv: Argv = ()
    forbidden_argv: tuple[str, ...] = ()
    """Flags that must not stand in the engine's command; their values go with them."""
    derate: dict[str, float] = {}
    """Flag -> how much its value is lowered, for memory that the backend takes on the GPU."""
    env: Env = {}
    forbidden_env: tuple[str, ...] = ()
    engine_config: dict[str, Any] = {}
    """Keys for the engine's configuration file, for an engine that has one."""
    files: tuple[ConfigFile, ...] = ()
    scratch: tuple[str, ...] = ()
    """Path placeholders of empty writable folders."""
    packages: tuple[str, ...] = ()
    """Pinned distributions that the services need beside what the image holds."""
    distributions: tuple[str, ...] = ()
    """Installed distributions whose versions the engine's process prints first, see workflow/versioned.py."""
    blocked_by: tuple[Blocker, ...] = ()
    services: tuple[Service, ...] = ()
    pinned_bytes: int = 0
    """Host memory that the tier takes, over all ranks."""
    proofs: tuple[Proof, ...] = ()
    versions: tuple[VersionProbe, ...] = ()
    notes: tuple[str, ...] = ()
    """Choices worth printing beside a result: a derate, a mode."""
    metrics: tuple[tuple[str, str], ...] = ()
    """(port placeholder, path) of Prometheus endpoints beside the engine's."""
    empties: Emptying | None = None
    """How the tier is emptied beside what the engine itself does; None: nothing empties it but a restart."""


class ServePlan(Strict):
    """Everything that is started for a point."""

    recipe: str
    backend: str
    served_model_name: str
    engine: Service
    sidecars: tuple[Service, ...]
    """Started before the engine, in this order."""
    router: Service | None
    """Started after the engine; takes the requests where there is one."""
    pinned_bytes: int
    proofs: tuple[Proof, ...]
    versions: tuple[VersionProbe, ...]
    notes: tuple[str, ...]
    metrics: tuple[tuple[str, str], ...]
    """(port placeholder, path) of each Prometheus endpoint."""
    cache: CacheFacts = CacheFacts()
    """What the recipe says about the KV cache; preflight compares the arm's flags with it."""
    files: tuple[ConfigFile, ...] = ()
    """Written, with their placeholders filled, before the first service is started."""
    scratch: tuple[str, ...] = ()
    """Path placeholders that are empty writable folders of the attempt."""
    wants: dict[str, str] = {}
    """Path placeholder -> what the node has to hold there: the checkpoint, a draft model, a chat template."""
    packages: tuple[str, ...] = ()
    """Pinned distributions that the image or environment must hold beside its own."""
    client_env: Env = {}
    """Variables of the replay client that this way of serving needs."""
    session_header: str | None = None
    """Header the router hashes; the client must send one value per session, or every turn misses its rank's cache."""
    blocked_by: tuple[Blocker, ...] = ()
    """Not empty: the plan is complete, but it is known not to run; it must not be started."""
    empties: Emptying | None = None
    """After it no tier holds any KV cache; None: nothing but a restart does that, so points never share this server."""

    @property
    def services(self) -> tuple[Service, ...]:
        """Return all services in the order they are started."""
        return (*self.sidecars, self.engine, *((self.router,) if self.router else ()))

    def shareable(self) -> Self:
        """Return the plan with an engine that can be told to empty its caches, where it has such a way."""
        if self.empties is None:
            return self
        engine = self.engine.model_copy(update={"env": {**self.engine.env, **self.empties.env}})
        return self.model_copy(update={"engine": engine})

    def in_environment(self, name: str) -> Self:
        """Return the plan with its services in a prepared environment, but for those that bring their own."""

        def placed(one: Service) -> Service:
            return one if one.environment else one.model_copy(update={"environment": name})

        return self.model_copy(
            update={
                "engine": placed(self.engine),
                "sidecars": tuple(placed(one) for one in self.sidecars),
                "router": placed(self.router) if self.router else None,
            }
        )

    @property
    def api_port(self) -> str:
        """Return the name of the port that takes the requests."""
        return (self.router or self.engine).probe.port


class Costs(Strict):
    """What a point is expected to take beside its window; the bill and the Slurm time limit come from it."""

    startup_s: Annotated[float, Field(gt=0)]
    warmup_s: Annotated[float, Field(ge=0)]


def ports_of(plan: ServePlan) -> tuple[str, ...]:
    """Return the names of all ports a plan needs, sorted."""
    texts = [text for service in plan.services for text in (*service.argv, *service.env.values())]
    texts += [file.text for file in plan.files]
    used = {name for text in texts for kind, name in PLACEHOLDER.findall(text) if kind == "port"}
    return tuple(sorted(used | {service.probe.port for service in plan.services}))


def fill(text: str, ports: Mapping[str, int], paths: Mapping[str, str]) -> str:
    """Replace the placeholders of one argument; raises InputError for a name that has no value."""

    def value(match: re.Match[str]) -> str:
        kind, name = match.groups()
        known: Mapping[str, object] = ports if kind == "port" else paths
        if name not in known:
            raise InputError(f"placeholder {match[0]} has no value", allowed=", ".join(sorted(known)))
        return str(known[name])

    return PLACEHOLDER.sub(value, text)


GIB = 1 << 30
GB = 1_000_000_000

# Memory of one GPU in GB, as sold. The vendor decides the transport and the wheels, `blackwell` the pinning limit.
GPU_MEMORY_GB: Mapping[str, int] = {
    "b200": 180,
    "b300": 288,
    "gb200": 192,
    "gb300": 288,
    "h100": 80,
    "h200": 141,
    "mi300x": 192,
    "mi325x": 256,
    "mi355x": 288,
    "rtx6000pro": 96,
}


def gpu_family(runner: str) -> str:
    """Return the GPU of a runner label: `cluster:b200-dgxc` is b200."""
    return runner.removeprefix("cluster:").split("-", 1)[0]


@dataclass(frozen=True)
class Situation:
    """What a backend decides from: the row, the model's cache and the recipe's options for this backend."""

    row: Row
    cache: CacheFacts
    options: Mapping[str, Any]

    @property
    def gpu(self) -> str:
        """Return the GPU family."""
        return gpu_family(self.row.runner)

    @property
    def vendor(self) -> Literal["amd", "nvidia", "none"]:
        """Return whose GPUs these are; `none` for a machine without."""
        if self.gpu not in GPU_MEMORY_GB:
            return "none"
        return "amd" if self.gpu.startswith("mi") else "nvidia"

    @property
    def blackwell(self) -> bool:
        """Tell whether the GPU is a Blackwell."""
        return self.gpu in ("b200", "b300", "gb200", "gb300", "rtx6000pro")

    @property
    def ranks(self) -> int:
        """Return the worker processes that each hold a share of the tier: one per GPU."""
        return self.row.gpus

    @property
    def engines(self) -> int:
        """Return the independent schedulers: one per rank under DP attention, else one."""
        return self.row.tp if self.row.dp_attn else 1

    @property
    def world_size(self) -> int:
        """Return the ranks of one scheduler."""
        return self.ranks // self.engines

    @property
    def tier_bytes(self) -> int:
        """Return the host memory of the offload tier over all ranks, in bytes.

        The budget is decimal GB and already in proportion to the GPUs used: it is never divided by the node again.
        """
        return max(0, self.row.total_cpu_dram_gb * GB - round(self.cache.host_reserve_gib * GIB))

    @property
    def tier_bytes_per_rank(self) -> int:
        """Return the host memory of one rank's share, in bytes."""
        return self.tier_bytes // self.ranks


Options = TypeVar("Options", bound=Strict)


def parse_options(model: type[Options], situation: Situation, backend: str) -> Options:
    """Check a recipe's options for a backend; raises InputError for an unknown or wrong one."""
    try:
        return model.model_validate(dict(situation.options))
    except ValidationError as error:
        raise InputError.join(
            InputError(
                f"found {issue['input']!r}: {issue['msg']}",
                key=".".join(("backends", backend, *(str(part) for part in issue["loc"]))),
                allowed=", ".join(sorted(model.model_fields)),
            )
            for issue in error.errors()
        ) from None


def flags_of(argv: Argv) -> dict[str, tuple[str, ...]]:
    """Return flag -> its values, `--flag value` and `--flag=value` alike; words before the first flag are under ""."""
    found: dict[str, tuple[str, ...]] = {}
    flag = ""
    for word in argv:
        if word.startswith("-") and not _is_number(word):
            flag, equals, value = word.partition("=")
            found[flag] = found.get(flag, ()) + ((value,) if equals else ())
        else:
            found[flag] = (*found.get(flag, ()), word)
    return found


def without_flags(argv: Argv, flags: tuple[str, ...]) -> Argv:
    """Return argv with some flags and their values left out."""
    kept: list[str] = []
    dropping = False
    for word in argv:
        if word.startswith("-") and not _is_number(word):
            dropping = word.split("=", 1)[0] in flags
        if not dropping:
            kept.append(word)
    return tuple(kept)


def lowered(argv: Argv, derate: Mapping[str, float]) -> Argv:
    """Return argv with the values of some flags lowered; a flag that is not there is left alone."""
    words = list(argv)
    for i, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag in derate:
            where, text = (i, value) if equals else (i + 1, words[i + 1])
            number = f"{float(text) - derate[flag]:.4f}".rstrip("0")
            words[where] = f"{flag}={number}" if equals else number
    return tuple(words)


def _is_number(word: str) -> bool:
    return _NEGATIVE.fullmatch(word) is not None
