"""What it takes to serve a model: services, probes, proofs and the plan that holds them together.

Ports and paths of a node are placeholders in argv and env, `<port:engine>` and `<path:model>`, so that a plan is the
same on every node and can be hashed into the identity of a point.
"""

import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from workflow.contract import InputError, Strict

PLACEHOLDER = re.compile(r"<(port|path):([a-z0-9-]+)>")

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


class VersionProbe(Strict):
    """Where the version that really serves is read back from."""

    component: str
    service: str
    pattern: str
    """Regular expression with a group named `version`, searched line by line in the service's log."""
    declared: str | None
    """The version that the search space asks for; None only records what was found."""


class Arm(Strict):
    """What one backend changes in a serve command, and nothing else may."""

    backend: str
    argv: Argv = ()
    forbidden_argv: tuple[str, ...] = ()
    """Flags that must not stand in the engine's command; their values go with them."""
    env: Env = {}
    forbidden_env: tuple[str, ...] = ()
    services: tuple[Service, ...] = ()
    pinned_bytes: int = 0
    """Host memory that the tier takes, over all ranks."""
    proofs: tuple[Proof, ...] = ()
    versions: tuple[VersionProbe, ...] = ()
    notes: tuple[str, ...] = ()
    """Choices worth printing beside a result: a derate, a mode."""


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

    @property
    def services(self) -> tuple[Service, ...]:
        """Return all services in the order they are started."""
        return (*self.sidecars, self.engine, *((self.router,) if self.router else ()))

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
