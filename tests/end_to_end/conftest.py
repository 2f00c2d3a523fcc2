"""A copy of the checkout in which real sweeps run, on the real engine, with a window of seconds."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.conftest import hear_interrupts

CONFIG = """\
changelog: {file: tests/end_to_end/changelog.yaml}
masters: [tests/end_to_end/master.yaml]
replay: {trace_set: coding-agent, duration_s: 6, grace_s: 3, warmup_grace_s: 60, request_timeout_s: 30, workers: 1}
# In seconds of replay, one pause between turns is a large share of the window, and one request of the tokens.
limits: {window_share: 0.5, above_ceiling: 0.05}
"""


@dataclass(frozen=True)
class Checkout:
    """A checkout that a test may change."""

    root: Path

    def argv(self, *arguments: str) -> list[str]:
        return [
            str(Path(sys.executable).parent / "snakemake"),
            "--configfile",
            "sweep.yaml",
            "--cores",
            "2",
            *arguments,
        ]

    def snakemake(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(self.argv(*arguments), cwd=self.root, capture_output=True, text=True, check=False)
        if check and done.returncode:
            raise AssertionError(
                f"snakemake {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr[-4000:]}"
            )
        return done

    def planned(self, *arguments: str) -> dict[str, int]:
        """Return the jobs of a dry run by rule."""
        text = self.snakemake("--dry-run", *arguments).stdout
        jobs: dict[str, int] = {}
        if "Job stats:" in text:
            for line in text.split("Job stats:", 1)[1].splitlines()[3:]:
                parts = line.split()
                if len(parts) != 2:
                    break
                jobs[parts[0]] = int(parts[1])
        jobs.pop("total", None)
        return jobs

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.argv(*arguments),
            cwd=self.root,
            stdout=subprocess.DEVNULL,
            stderr=(self.root / "stderr.log").open("w"),
            text=True,
            start_new_session=True,
            preexec_fn=hear_interrupts,  # noqa: PLW1509 - the test starts no threads
        )

    @property
    def results(self) -> Path:
        return self.root / "results"

    def runs(self) -> list[Path]:
        return sorted(self.results.glob("runs/*/run.json"))


def running_in(root: Path) -> list[str]:
    """Return live processes whose output goes to a file below a folder, as text.

    Not by the mark that the product itself looks for: a program that renames itself loses it. And not all that carry
    one: other checkouts on this machine may be measuring.
    """
    found = set()
    for process in psutil.process_iter():
        for number in (1, 2):
            with contextlib.suppress(OSError, psutil.Error):
                target = Path(f"/proc/{process.pid}/fd/{number}").readlink()
                if target.is_relative_to(root) and process.status() != psutil.STATUS_ZOMBIE:
                    found.add(f"{process.pid} {' '.join(process.cmdline())[:120]}")
    return sorted(found)


def wait_for(condition: Callable[[], object], deadline_s: float, what: str) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"waited {deadline_s:.0f} s in vain for: {what}"
        time.sleep(0.2)


def copy_checkout(project: Path, root: Path) -> Checkout:
    """Copy what git tracks or would track; environments are shared, since their path holds what they are."""
    listed = subprocess.run(
        ["git", "-C", project, "ls-files", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.splitlines():
        source = project / name
        if source.is_file() and not source.is_symlink():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, root / name)
    (project / ".envs").mkdir(exist_ok=True)
    (root / ".envs").symlink_to(project / ".envs")
    (root / "sweep.yaml").write_text(CONFIG)
    return Checkout(root)


@pytest.fixture(scope="session")
def swept(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """Return a checkout whose sweep of two arms has run to its end."""
    checkout = copy_checkout(project, tmp_path_factory.mktemp("swept"))
    checkout.snakemake()
    return checkout


@pytest.fixture
def fresh(project: Path, swept: Checkout, tmp_path: Path) -> Checkout:
    """Return a checkout with its parts prepared and nothing measured."""
    checkout = copy_checkout(project, tmp_path)
    for part in ("traces", "models"):
        shutil.copytree(swept.results / part, checkout.results / part, symlinks=True)
    return checkout


def end(process: subprocess.Popen[str]) -> None:
    """End a Snakemake that a failing test left behind."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
