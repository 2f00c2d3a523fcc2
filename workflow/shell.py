"""A serve plan as shell text: what a person pastes to start the same servers by hand."""

import shlex
from collections.abc import Mapping

from workflow.serving import ServePlan, Service, fill, ports_of


def as_shell(plan: ServePlan, paths: Mapping[str, str] | None = None, first_port: int = 8888) -> str:
    """Return a plan as shell text that a person can paste: files, then one service after the other.

    `paths` gives values for path placeholders; those without one lie below the current folder. Ports are counted up
    from `first_port` in the order in which the services are started.
    """
    ports = {name: first_port + i for i, name in enumerate(_ports_in_order(plan))}
    values = {
        "project": ".",
        **{name: f"models/{what}" for name, what in plan.wants.items()},
        **{file.path: f"serve/{file.filename}" for file in plan.files},
        **{name: f"serve/{name}" for name in plan.scratch},
        **(paths or {}),
    }
    lines = [f"# {plan.served_model_name}, recipe {plan.recipe}, backend {plan.backend}"]
    lines += [f"# known not to run ({blocker.code}): {blocker.says}" for blocker in plan.blocked_by]
    lines += [f"# note: {note}" for note in plan.notes]
    lines += [f"# needs: {package}" for package in plan.packages]
    lines += [f"# wants: {what} in {values[name]}" for name, what in plan.wants.items()]
    if folders := [*(f"serve/{name}" for name in plan.scratch), *(("serve",) if plan.files else ())]:
        lines.append(shlex.join(["mkdir", "-p", *folders]))
    for file in plan.files:
        text = fill(file.text, ports, values).rstrip("\n")
        lines += [f"cat > {shlex.quote(values[file.path])} <<'EOF'", text, "EOF"]
    for service in plan.services:
        lines += ["", f"# {service.name}", *_service_lines(service, ports, values)]
    if plan.session_header:
        lines += [
            "",
            f"# the client sends {plan.session_header}, one value per session, to port {ports[plan.api_port]}",
        ]
        lines += [f"export {name}={shlex.quote(value)}" for name, value in plan.client_env.items()]
    return "\n".join(lines) + "\n"


def _service_lines(service: Service, ports: Mapping[str, int], paths: Mapping[str, str]) -> list[str]:
    head = ["env", *(word for name in service.unset for word in ("-u", name))]
    head += [f"{name}={fill(value, ports, paths)}" for name, value in service.env.items()]
    words = [fill(word, ports, paths) for word in service.argv]
    lines: list[list[str]] = [head] if len(head) > 1 else []
    current: list[str] = []
    for word in words:
        if word.startswith("-") and word != "--" and current:
            lines.append(current)
            current = []
        current.append(word)
    lines.append(current)
    command = " \\\n  ".join(shlex.join(line) for line in lines)
    url = f"http://127.0.0.1:{ports[service.probe.port]}{service.probe.path}"
    return [
        f"{command} > {service.name}.log 2>&1 &",
        f"until curl --fail --silent --output /dev/null {url}; do sleep 2; done",
    ]


def _ports_in_order(plan: ServePlan) -> tuple[str, ...]:
    listed = ports_of(plan)
    first = [plan.api_port, *(service.probe.port for service in plan.services)]
    return tuple(dict.fromkeys((*first, *listed)))
