"""Routers in front of DP-attention ranks: every turn of a session goes to the rank that holds its prefix.

Without one, each turn lands on another rank and the prefix cache of the last turn is useless.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from workflow.engines.launching import version_probe, versioned
from workflow.matrix import Component, Row
from workflow.serving import Argv, Env, Probe, Service, VersionProbe


@dataclass(frozen=True)
class Router:
    """One router program: how it is started and how the client tells it which session a request belongs to."""

    name: str
    distribution: str
    command: Argv
    policy: Argv
    session_header: str
    client_env: Env
    """Switches of InferenceX's replay client that make it send `session_header`."""

    def service(self, row: Row) -> Service:
        """Return the service; it takes the requests on its own port, the engine keeps the other one."""
        argv = (*self.command, "--worker-urls", "http://127.0.0.1:<port:engine>", *self.policy)
        if self.name == "vllm-router":
            argv += ("--intra-node-data-parallel-size", str(row.tp))
        argv += ("--host", "127.0.0.1", "--port", "<port:router>")
        argv += ("--prometheus-host", "127.0.0.1", "--prometheus-port", "<port:router-metrics>")
        # An agent's prompt can wait for minutes and stream for long: a router that gives up or sends the request
        # a second time counts work twice.
        argv += ("--request-timeout-secs", "14400", "--disable-retries")
        return Service(
            name="router",
            argv=versioned((self.distribution,), argv),
            env={},
            environment=None,
            probe=Probe(port="router", path="/health", deadline_s=300.0),
        )

    def versions(self, component: Component) -> tuple[VersionProbe, ...]:
        """Return how its version is read back, and which one the row declares."""
        return (version_probe(self.distribution, "router", component.version),)

    def packages(self, component: Component) -> tuple[str, ...]:
        """Return what has to be installed for it."""
        return (f"{self.distribution}=={component.version}",) if component.version else (self.distribution,)


ROUTERS: Mapping[str, Router] = {
    "vllm-router": Router(
        name="vllm-router",
        distribution="vllm-router",
        command=("vllm-router",),
        policy=("--policy", "consistent_hash"),
        session_header="X-Session-ID",
        client_env={"AIPERF_HTTP_X_SESSION_ID_FROM_CORRELATION_ID": "1"},
    ),
    "sglang-router": Router(
        name="sglang-router",
        distribution="sglang-router",
        command=("python3", "-m", "sglang_router.launch_router"),
        policy=(
            *("--policy", "consistent_hashing", "--request-id-headers", "x-correlation-id", "--dp-aware"),
            # A busy rank answers health checks late, and the router would take it out in the middle of a replay.
            *("--connect-timeout-secs", "900", "--disable-health-check"),
        ),
        session_header="X-SMG-Routing-Key",
        client_env={"AIPERF_HTTP_X_SMG_ROUTING_KEY_FROM_CORRELATION_ID": "true"},
    ),
}
