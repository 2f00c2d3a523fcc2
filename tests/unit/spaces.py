"""Small search spaces, logs and hardware facts for tests of the matrix."""

from pathlib import Path

from workflow.changelog import LoggedEntry, parse_changelog
from workflow.searchspace import Master, Runners, parse_master, parse_runners

RUNNERS = """
labels: {b200: [b200_0], cluster:b200-dgxc: [b200_0], cluster:gb200-nv: [gb200_0], cluster:bare: [x]}
hardware:
  cluster:b200-dgxc: {available-cpu-dram-mib: 3_095_781, gpus-per-node: 8}
  cluster:gb200-nv: {available-cpu-dram-mib: 860_160, gpus-per-node: 4}
"""

COMMON = (
    "image: vllm/vllm-openai:v0.27.1\n  model: org/Model\n  model-prefix: dsv4\n  precision: fp4\n  framework: vllm"
)


def space(key: str, body: str, *, runner: str = "cluster:b200-dgxc", multinode: bool = False, more: str = "") -> str:
    """One config key; `body` is the text of `scenarios`, indented by four."""
    head = f"{key}:\n  {COMMON}\n  runner: {runner}\n  multinode: {str(multinode).lower()}\n"
    return f"{head}{more}  scenarios:\n{body}"


def agentic(*lines: str, utilization: float | None = 0.8) -> str:
    share = "" if utilization is None else f"      dram-utilization: {utilization}\n"
    listed = "".join(f"      - {{{line}}}\n" for line in lines)
    return f"    agentic-coding:\n    - search-space:\n{listed}{share}"


def fixed(*lines: str, isl: int = 8192, osl: int = 1024) -> str:
    listed = "".join(f"      - {{{line}}}\n" for line in lines)
    return f"    fixed-seq-len:\n    - isl: {isl}\n      osl: {osl}\n      search-space:\n{listed}"


def worker(tp: int, *, num: int = 1, ep: int = 1, more: str = "") -> str:
    return f"{{num-worker: {num}, tp: {tp}, ep: {ep}, dp-attn: {str(ep > 1).lower()}{more}}}"


def master(*texts: str) -> Master:
    return parse_master([(Path("master.yaml"), "".join(texts).encode())])


def runners(text: str = RUNNERS) -> Runners:
    return parse_runners(Path("runners.yaml"), text.encode())


def log(*entries: str) -> tuple[LoggedEntry, ...]:
    return parse_changelog("".join(entries).encode(), Path("perf-changelog.yaml"))


def entry(*keys: str, pull: object = 7, says: str = "Measure it.", more: str = "") -> str:
    listed = "".join(f"  - {key!r}\n" for key in keys)
    link = f"https://example.org/team/sweeps/pull/{pull}"
    return f"- config-keys:\n{listed}  description:\n  - {says!r}\n  pr-link: {link}\n{more}"
