"""Points for tests, made from the search spaces of arms.py."""

from arms import planned, recipes

from workflow.config import GeneratedTraces, Replay
from workflow.plans import plan_for
from workflow.points import Point, make_point, trace_identity

TRACES = GeneratedTraces(
    kind="generated", seed=1, sessions=4, turns_max=4, prompt_tokens_max=64000, scale=1, think_time_cap_s=4.0
)


def point(key: str = "dsv4-b200-vllm", backend: str = "none", **replay: float) -> Point:
    """Return one point; `replay` are settings of its replay."""
    row = planned(key, backend)
    plan, costs = plan_for(row, recipes())
    locks = {"aiperf": "aiperf-00000000", "llamacpp": "llamacpp-00000000"}
    settled = Replay(**{"client_version": "0.13.0", **replay})
    return make_point(row, plan, costs, trace_identity("few", TRACES, 1), settled, None, locks)
