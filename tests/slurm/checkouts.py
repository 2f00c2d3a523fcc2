"""Checkouts to run sweeps in, and how to look at what Slurm does with them."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from workflow.contract import write_atomic
from workflow.environments import Environment, environment_key

HERE = Path(__file__).parent
PROJECT = HERE.parents[1]
QUICK = ("--slurm-init-seconds-before-status-checks", "1", "--latency-wait", "20")


class Checkout:
    """A clean checkout with the tests' sweep, engine and client."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.heads: list[subprocess.Popen[str]] = []
        names = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=PROJECT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for name in names:
            source = PROJECT / name
            if name.startswith(("tests/", "docs/")) or not (source.exists() or source.is_symlink()):
                continue
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, root / name, follow_symlinks=False)
        shutil.copytree(HERE / "sweep", root / "configs", dirs_exist_ok=True)
        # The profile stays; recipes and locks of the real engines go, so that nothing but the scripted one is planned.
        for path in (root / "configs/recipes").iterdir():
            if path.name != "scripted.yaml":
                path.unlink()
        self.behave({})
        self._environment("llamacpp", "xllamacpp", "python", "scripted_engine.py")
        self._environment("aiperf", "aiperf", "aiperf", "scripted_client.py")

    def _environment(self, lock: str, package: str, command: str, script: str) -> None:
        key = environment_key(self.root / f"configs/environments/{lock}.txt")
        folder = self.root / ".envs" / key
        version = (self.root / f"configs/environments/{lock}.txt").read_text().split("==")[1].strip()
        Environment(schema_version=1, key=key, python="3", packages={package: version}).write(
            folder / "environment.json"
        )
        program = folder / "bin" / command
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {HERE / script} "$@"\n')
        program.chmod(0o755)
        corpus = folder / "lib/python3/site-packages/aiperf/dataset/generator/assets/shakespeare.txt"
        corpus.parent.mkdir(parents=True)
        corpus.write_text(" ".join(f"word{number} of text" for number in range(4000)))

    def behave(self, rules: dict[str, dict[str, object]]) -> None:
        """Say what the client does at which point."""
        write_atomic(self.root / "behaviour.json", json.dumps(rules).encode())

    def edit(self, name: str, old: str, new: str) -> None:
        """Replace text in a file, which must be there."""
        text = (self.root / name).read_text()
        assert old in text
        (self.root / name).write_text(text.replace(old, new))

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start `snakemake` in a session of its own, its output in head.log."""
        with (self.root / "head.log").open("a") as log:
            head = subprocess.Popen(
                [str(Path(sys.executable).parent / "snakemake"), *arguments],
                cwd=self.root,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
                # Below `nohup` or in a background job SIGINT is ignored, and inherited so.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - no threads here
            )
        self.heads.append(head)
        return head

    def close(self) -> None:
        """End the heads and jobs that a failed test left behind."""
        for head in self.heads:
            if head.poll() is None:
                head.kill()
                head.wait()
        if live := [number for number, state, _ in self.jobs() if state in ("RUNNING", "PENDING")]:
            subprocess.run(["scancel", *live], check=True)

    def snakemake(self, *arguments: str, timeout_s: float = 240.0) -> tuple[int, str]:
        """Run `snakemake` to its end and return its exit code and what it said."""
        before = len(self.said)
        process = self.start(*arguments)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            process.wait(60)
            raise
        return code, self.said[before:]

    @property
    def said(self) -> str:
        """Return all that `snakemake` said so far."""
        path = self.root / "head.log"
        return path.read_text() if path.exists() else ""

    def status(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `python -m workflow.status`."""
        return subprocess.run(
            [sys.executable, "-m", "workflow.status", *arguments],
            cwd=self.root,
            capture_output=True,
            text=True,
            check=False,
        )

    def states(self) -> dict[str, dict[str, object]]:
        """Return the state of each point, by `<arm>-c<concurrency>`."""
        answer = self.status("--json")
        assert answer.returncode == 0, answer.stderr
        found = [json.loads(line) for line in answer.stdout.splitlines()]
        return {f"{state['arm']}-c{state['concurrency']}": state for state in found}

    def seen(self) -> list[dict[str, object]]:
        """Return what each replay saw of its allocation."""
        return [json.loads(path.read_text()) for path in sorted((self.root / "seen").glob("*.json"))]

    def jobs(self) -> list[tuple[str, str, str]]:
        """Return (id, state, point) of every job that was submitted from here, ended ones too, oldest first."""
        text = slurm_says("squeue", "--states=all", "--noheader", "--format=%i|%T|%k|%Z")
        found = [line.split("|") for line in text.splitlines()]
        jobs = [
            (number, state, comment.removeprefix("rule_run_point_wildcards_"))
            for number, state, comment, folder in found
            if folder == str(self.root)
        ]
        return sorted(jobs, key=lambda job: int(job[0]))

    def job_of(self, key: str, state: str = "RUNNING") -> str:
        """Wait until the job of a point is in a state, and return its id."""
        found: list[str] = []

        def there() -> bool:
            found[:] = [number for number, now, point in self.jobs() if f"-{key}-" in point and now == state]
            return bool(found)

        until(there, f"a job of {key} that is {state}")
        return found[0]


def slurm_says(*argv: str) -> str:
    """Run a command of Slurm; a busy controller drops a request now and then."""
    for _ in range(3):
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout
        time.sleep(1)
    raise AssertionError(f"{' '.join(argv)}: {done.stderr}")


def until(condition: Callable[[], bool], what: str, timeout_s: float = 90.0) -> None:
    """Wait for something to happen."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"never seen: {what}"
        time.sleep(0.3)


def planned(checkout: Checkout) -> list[str]:
    """Plan, and return the ids of the points."""
    code, said = checkout.snakemake("-n", "-q", "-c1")
    assert code == 0, said[-3000:]
    return [line.split("\t")[0] for line in (checkout.root / "results/plan.tsv").read_text().splitlines()[1:]]
