import os
import subprocess
import sys

import pytest

SCRIPT = "workflow/versioned.py"


def run(project, *arguments):
    command = [sys.executable, str(project / SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_it_prints_installed_versions_and_becomes_the_command(project):
    done = run(project, "pytest", "none=no-such-thing,pytest", "gone", "--", sys.executable, "-c", "print('served')")
    version = pytest.__version__
    assert done.stdout.splitlines() == [
        f"version of pytest is {version}",
        f"version of none is {version}",
        "version of gone is not-installed",
        "served",
    ]
    assert done.returncode == 0


def test_the_command_is_the_one_of_its_own_python_although_that_is_not_on_the_path(project, tmp_path):
    """An environment is called by path, and `vllm` of another one, or none, would be found on the PATH."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    for folder in ("env/bin", "elsewhere"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "engine").write_text(f"#!/bin/sh\necho {folder}\n")
        (tmp_path / folder / "engine").chmod(0o755)
    command = [str(tmp_path / "env/bin/python3"), str(project / SCRIPT), "--", "engine"]
    path = f"{tmp_path / 'elsewhere'}:{os.environ['PATH']}"
    done = subprocess.run(command, env={"PATH": path}, capture_output=True, text=True, check=True)
    assert done.stdout == "env/bin\n"


def test_the_commands_exit_status_is_the_services(project):
    assert run(project, "--", sys.executable, "-c", "raise SystemExit(7)").returncode == 7


def test_a_command_that_is_not_there_is_one_line_and_not_a_traceback(project):
    done = run(project, "--", "no-such-command-here")
    assert done.returncode == 1
    assert done.stderr.startswith("cannot start no-such-command-here: ")


def test_without_a_command_the_usage_is_printed(project):
    assert "usage" in run(project, "vllm").stderr
