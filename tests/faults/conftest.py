"""A bench on which one point is measured with servers and clients that break, through the product's own entry."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.end_to_end.conftest import CONFIG, Checkout, copy_checkout, running_in, wait_for
from workflow import images, leftovers, runs
from workflow.config import load_config
from workflow.environments import Environment
from workflow.failures import Failure, last_failure
from workflow.points import Point
from workflow.serving import Probe, Service
from workflow.sweep import plan_sweep
from workflow.traces import TraceManifest, folder_sha256

HERE = Path(__file__).parent
CLUSTERS = """\
clusters:
  cluster:local:
    launcher: bare
    model_paths: {offload-sweep/tiny-llama: %s}
"""


@dataclass(frozen=True)
class Bench:
    """One point with its parts; each method that changes something returns another bench."""

    root: Path
    point: Point
    environments: Path
    clusters: Path

    def with_plan(self, **change: Any) -> "Bench":
        """Return a bench whose point has another serve plan."""
        return replace(self, point=self.point.model_copy(update={"plan": self.point.plan.model_copy(update=change)}))

    def with_point(self, **change: Any) -> "Bench":
        """Return a bench with another point."""
        return replace(self, point=self.point.model_copy(update=change))

    def with_replay(self, **change: Any) -> "Bench":
        """Return a bench whose point is replayed otherwise."""
        return replace(
            self, point=self.point.model_copy(update={"replay": self.point.replay.model_copy(update=change)})
        )

    def engine(self, *arguments: str, deadline_s: float = 20.0) -> "Bench":
        """Return a bench that serves with the scripted engine."""
        argv = (sys.executable, str(HERE / "engine.py"), "--port", "<port:engine>", "--name", self.served, *arguments)
        probe = Probe(port="engine", path="/health", deadline_s=deadline_s)
        service = Service(name="engine", argv=argv, env={}, environment=None, probe=probe)
        return self.with_plan(engine=service, proofs=(), versions=(), metrics=(("engine", "/metrics"),))

    def sidecar(self) -> "Bench":
        """Return a bench with a second server beside the engine."""
        argv = (sys.executable, str(HERE / "engine.py"), "--port", "<port:store>")
        probe = Probe(port="store", path="/health", deadline_s=20.0)
        return self.with_plan(sidecars=(Service(name="store", argv=argv, env={}, environment=None, probe=probe),))

    @property
    def served(self) -> str:
        return self.point.plan.served_model_name

    @property
    def out(self) -> Path:
        return self.root / "results/runs" / self.point.id

    @property
    def results(self) -> Path:
        return self.root / "results"

    @property
    def attempts(self) -> list[Path]:
        # Not by name: two attempts in one second are told apart by their process ids, which may go either way.
        folders = [path for path in self.out.iterdir() if path.is_dir()]
        return sorted(folders, key=lambda path: min(file.stat().st_mtime_ns for file in (path, *path.iterdir())))

    def log(self, name: str) -> str:
        """Return a log of the last attempt; empty where a service has not been started yet."""
        path = self.attempts[-1] / name
        return path.read_text(errors="replace") if path.exists() else ""

    def run(self, tries: int = 1) -> int:
        """Measure the point in this process; return the exit code."""
        cluster = images.cluster_of(self.point, self.clusters)
        return runs.run(
            self.point,
            self.out,
            self.results,
            self.environments,
            cluster=cluster,
            tries=tries,
            parent=None,
            log=None,
        )

    def start(self) -> subprocess.Popen[str]:
        """Measure the point in a process of its own, as the rule does."""
        file = self.root / "point.json"
        self.point.write(file)
        argv = [sys.executable, "-m", "workflow.runs", str(file), str(self.out), "--results", str(self.results)]
        argv += ["--environments", str(self.environments), "--clusters", str(self.clusters)]
        # The job handles SIGINT whatever it inherits, so it is started as it is below `nohup`.
        return subprocess.Popen(argv, cwd=HERE.parents[1], stderr=subprocess.PIPE, text=True, start_new_session=True)

    def failure(self) -> Failure:
        """Return the record of the last failure; there has to be one."""
        found = last_failure(self.results / "failures", self.point.id)
        assert found is not None
        return found

    def published(self) -> runs.Run:
        """Return the published run."""
        return runs.Run.read(self.out / "run.json")

    def left(self) -> list[str]:
        """Return live processes whose output goes to this bench."""
        return running_in(self.root)

    def records(self) -> list[str]:
        """Return the client's records of the last attempt."""
        path = self.attempts[-1] / "client/profile_export.jsonl"
        return path.read_text().splitlines() if path.exists() else []

    def wait_for_records(self, number: int, deadline_s: float = 90.0) -> None:
        """Wait until a replay of this bench has so many records."""
        wait_for(lambda: self.out.is_dir() and self.attempts and len(self.records()) >= number, deadline_s, "a replay")

    def wait_for_client_line(self, text: str, deadline_s: float = 90.0) -> None:
        """Wait until the replay client has said something."""

        def said() -> bool:
            logs = list(self.out.glob("*/client/logs/aiperf.log"))
            return bool(logs) and text in logs[-1].read_text(errors="replace")

        wait_for(said, deadline_s, text)

    def pid_of(self, name: str) -> int:
        """Return the pid of a running service, or of the client's first process."""
        log = str(self.attempts[-1] / f"{name}.log")
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if str(Path(f"/proc/{process.pid}/fd/1").readlink()) == log and os.getsid(process.pid) == process.pid:
                    return process.pid
        raise AssertionError(f"no {name} runs")


@pytest.fixture(scope="session")
def planned(project: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Point]:
    """Return the points of the end-to-end sweep, by arm."""
    file = tmp_path_factory.mktemp("config") / "sweep.yaml"
    file.write_text(CONFIG)
    with contextlib.chdir(project):
        sweep = plan_sweep(load_config([file], {}))
    return {point.arm: point for point in sweep.points.values()}


@pytest.fixture
def bench(planned: dict[str, Point], tmp_path: Path) -> Iterator[Bench]:
    """Return a bench with scripted engine and client; nothing of it may be left after the test."""
    point = planned["none"].model_copy(update={"made_model": None})
    environments, checkpoint = tmp_path / "envs", tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    for name, key in point.environments.items():
        folder = environments / key
        (folder / "bin").mkdir(parents=True)
        packages = {point.replay.client: point.replay.client_version} if name == point.replay.client else {}
        Environment(schema_version=1, key=key, python="3.11", packages=packages).write(folder / "environment.json")
    script = environments / point.environments[point.replay.client] / "bin/aiperf"
    script.write_text(f"#!{sys.executable}\n" + (HERE / "client.py").read_text())
    script.chmod(0o755)
    traces = tmp_path / "results/traces" / point.trace.key
    (traces / "sessions").mkdir(parents=True)
    (traces / "sessions/one.json").write_text("{}")
    TraceManifest(
        schema_version=TraceManifest.SCHEMA_VERSION,
        name=point.trace.name,
        declaration=point.trace.declaration,
        sessions=1,
        requests=1,
        prompt_tokens=1,
        longest_prompt_tokens=1,
        ceiling_share=0.5,
        content_sha256=folder_sha256(traces / "sessions"),
    ).write(traces / "trace_set.json")
    clusters = tmp_path / "clusters.yaml"
    clusters.write_text(CLUSTERS % checkpoint)
    made = Bench(tmp_path, point, environments, clusters).engine().with_replay(duration_s=2.0)
    yield made
    wait_for(lambda: not made.left(), 15, f"the end of {made.left()}")
    assert not list(leftovers.SHM.glob(f"vllm_offload_{os.getpid()}*")), "shared memory was left behind"
    assert not list(made.out.glob("lease.json")), "a lease was left behind"
    for path in made.out.glob("run.json"):
        runs.Run.read(path)


@pytest.fixture(scope="session")
def prepared(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """Return a checkout with real environments, sessions and model, and nothing measured."""
    checkout = copy_checkout(project, tmp_path_factory.mktemp("prepared"))
    checkout.snakemake("--dry-run")
    points = [Point.read(path) for path in checkout.results.glob("points/*.json")]
    targets = {f"results/traces/{point.trace.key}/trace_set.json" for point in points}
    targets |= {f"results/models/{point.model_key}/model.json" for point in points}
    targets |= {f".envs/{key}/environment.json" for point in points for key in point.environments.values()}
    # An environment that is there already has no job that could make it again.
    if missing := sorted(target for target in targets if not (checkout.root / target).exists()):
        checkout.snakemake("--", *missing)
    return checkout


@pytest.fixture
def real(prepared: Checkout, planned: dict[str, Point], project: Path, tmp_path: Path) -> Iterator[Bench]:
    """Return a bench with llama.cpp and the real client."""
    for part in ("traces", "models"):
        (tmp_path / "results").mkdir(exist_ok=True)
        (tmp_path / "results" / part).symlink_to(prepared.results / part)
    made = Bench(tmp_path, planned["none"], project / ".envs", project / "configs/clusters.yaml")
    yield made
    wait_for(lambda: not made.left(), 15, f"the end of {made.left()}")
    assert not list(made.out.glob("lease.json"))


def end(process: subprocess.Popen[str]) -> str:
    """End a job that a failing test left behind; return what it said."""
    with contextlib.suppress(ProcessLookupError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.communicate()[1]
