"""From an empty node to a server that answers as the point declares: preflight, services in order, the first token."""

import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workflow import endpoints, leftovers, processes, scratch
from workflow.attempt import Attempt, StartedService
from workflow.contract import InputError, write_atomic
from workflow.environments import same_version
from workflow.failures import AttemptFailed, FailureClass
from workflow.node import NodeFacts, read_facts
from workflow.preflight import preflight
from workflow.serving import Service, fill, ports_of

OF_THIS_NODE = frozenset(
    {"gpu_memory_in_use", "ports_taken", "rdma_down", "shm_below_lmcache", "shm_too_small", "tier_above_available"}
)
"""Preflight rules that a state of one node may break, not only what was declared: another try costs seconds."""


def check_node(attempt: Attempt) -> tuple[str, ...]:
    """Compare the point with the node it is on, keep the facts in `node.json`, and return the warnings.

    Raises AttemptFailed with every error, before anything is started: configuration where the hour would be lost again
    on any node, node_unfit where another node may do.
    """
    facts = node_facts(attempt)
    write_atomic(attempt.folder / "node.json", facts.model_dump_json(indent=1).encode())
    found = preflight(attempt.point, attempt.point.plan, facts)
    errors = [one for one in found if one.severity == "error"]
    if errors:
        kind = FailureClass.CONFIGURATION
        if all(one.code in OF_THIS_NODE for one in errors):
            kind = FailureClass.NODE_UNFIT
        raise AttemptFailed(kind, f"preflight on this node: {'; '.join(map(str, errors))}")
    warnings = tuple(str(one) for one in found)
    for warning in warnings:
        attempt.say(f"preflight: {warning}")
    return warnings


def node_facts(attempt: Attempt) -> NodeFacts:
    """Return what this node says about itself, for this point."""
    cluster = attempt.launcher.cluster
    if (wrong := scratch.unusable(cluster)) is not None:
        raise AttemptFailed(FailureClass.CONFIGURATION, f"{attempt.point.row.runner}: {wrong}")
    facts = read_facts(attempt.parts.paths, attempt.folder if cluster.scratch is None else Path(cluster.scratch))
    gpus = gpu_memory_used_shares()
    known: dict[str, Any] = {"packages": attempt.parts.packages}
    if facts.shm_leftovers:
        # What a live server of another job has open is no leftover.
        used = leftovers.in_use()
        known["shm_leftovers"] = tuple(name for name in facts.shm_leftovers if name not in used)
    if gpus:
        known |= {"gpus_visible": len(gpus), "gpu_memory_used_share": max(gpus)}
    return facts.model_copy(update=known)


def nvidia_smi() -> tuple[str, ...] | None:
    """Return the command that asks about the job's own NVIDIA GPUs, or None without the tool.

    It lists all GPUs of the node unless the job's control group hides some; CUDA_VISIBLE_DEVICES it ignores.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return (tool, f"--id={chosen}") if chosen else (tool,)


def gpu_memory_used_shares() -> list[float]:
    """Return the share of memory in use on each NVIDIA GPU of the job; empty where it cannot be asked."""
    command = nvidia_smi()
    if command is None:
        return []
    argv = [*command, "--query-gpu=memory.used,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []  # the rules that need it then say nothing
    pairs = re.findall(r"^\s*(\d+),\s*(\d+)\s*$", done.stdout, re.MULTILINE)
    return [int(used) / int(total) for used, total in pairs if int(total)]


def serve(attempt: Attempt) -> None:
    """Start all services in order, each until it is ready, and prove that the model answers; raises AttemptFailed."""
    plan = attempt.point.plan
    attempt.ports = processes.free_ports(ports_of(plan))
    for file in plan.files:
        write_atomic(attempt.folder / file.filename, fill(file.text, attempt.ports, attempt.paths()).encode())
    for service in plan.services:
        _start(attempt, service)
    _probe_model(attempt)


def _start(attempt: Attempt, service: Service) -> None:
    paths = attempt.paths()
    argv = tuple(fill(word, attempt.ports, paths) for word in service.argv)
    env = {name: fill(value, attempt.ports, paths) for name, value in service.env.items()}
    if service.environment is not None:
        argv, env = in_environment(argv, env, attempt.parts.environments[service.environment])
    log = attempt.log_of(service.name)
    attempt.started.append(StartedService(name=service.name, argv=argv, env=env, log=log.name))
    try:
        mark = {processes.TOKEN_VARIABLE: attempt.name}
        command = attempt.launcher.command(service.name, argv, env, service.unset, mark)
        process = attempt.start(service.name, command, service.unset)
    except (OSError, InputError) as error:
        raise AttemptFailed(FailureClass.CONFIGURATION, f"{service.name} cannot be started: {error}") from None
    attempt.running.append(process)
    deadline_s, port = service.probe.deadline_s, attempt.ports[service.probe.port]
    attempt.say(f"{service.name}: starting, at most {deadline_s:.0f} s")

    def ready() -> bool:
        attempt.check_parent()
        attempt.check_alive()
        answers = endpoints.answers(attempt.url(service.probe.port, service.probe.path))
        return answers and processes.owns_port(process, port)

    if not processes.wait_until(ready, deadline_s):
        raise AttemptFailed(
            FailureClass.ENGINE_NOT_READY,
            f"{service.name} was not ready after {deadline_s:.0f} s{_stranger(process, port)}{_last_words(log)}",
        )
    attempt.say(f"{service.name}: ready")


def in_environment(
    argv: tuple[str, ...], env: Mapping[str, str], environment: Path
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return a command and its variables in a prepared environment.

    Its programs come first on the PATH: the command may start others of them by name, and compile kernels with the
    node's tools.
    """
    programs = environment / "bin"
    path = os.pathsep.join((str(programs), env.get("PATH", os.environ.get("PATH", os.defpath))))
    return (str(programs / argv[0]), *argv[1:]), {**env, "PATH": path}


def _stranger(process: processes.Managed, port: int) -> str:
    """Say who else listens on the service's port, if anybody does."""
    owner = processes.listener(port)
    if owner is None or processes.owns_port(process, port):
        return ""
    return f"; its port {port} is taken by process {owner.pid}, which is not ours"


def _last_words(log: Path) -> str:
    """Quote the last line of a log: it says in which phase of loading the service hangs."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"; its last line: {lines[-1].strip()[:200]}" if lines else "; it said nothing"


def _probe_model(attempt: Attempt) -> None:
    """Prove that our model answers: a healthy server with another model wastes the whole window."""
    name = attempt.point.plan.served_model_name
    port = attempt.point.plan.api_port
    models = endpoints.ask(attempt.url(port, "/v1/models"))
    served = [entry.get("id") for entry in models.get("data", [])] if isinstance(models, dict) else models
    if name not in served:
        raise AttemptFailed(
            FailureClass.CONFIGURATION, f"the server names models {served}, the point asks for {name!r}"
        )
    body = {"model": name, "messages": [{"role": "user", "content": "ready?"}], "max_tokens": 2}
    limit_s = min(attempt.point.replay.request_timeout_s, 600.0)
    answer = endpoints.ask(attempt.url(port, "/v1/chat/completions"), body, limit_s)
    tokens = (answer.get("usage") or {}).get("completion_tokens", 0) if isinstance(answer, dict) else 0
    if not tokens:
        raise AttemptFailed(
            FailureClass.ENGINE_NOT_READY, f"the server answers a probe without a token: {str(answer)[:300]}"
        )


def versions_of(attempt: Attempt) -> dict[str, str | None]:
    """Read the versions in use back from the logs; raises AttemptFailed where a declared one does not serve."""
    found: dict[str, str | None] = {}
    for probe in attempt.point.plan.versions:
        pattern = re.compile(probe.pattern)
        with attempt.log_of(probe.service).open(errors="replace") as log:
            # A version is said at the start: a log of hours is not searched for one that was never said.
            matches = (match for line in itertools.islice(log, 20_000) if (match := pattern.search(line)))
            match = next(matches, None)
        found[probe.component] = match["version"] if match else None
        if probe.declared is not None and not same_version(found[probe.component], probe.declared):
            raise AttemptFailed(
                FailureClass.VERSION_MISMATCH,
                f"{probe.component} {found[probe.component] or '?'} serves, {probe.declared} is declared",
            )
    return found
