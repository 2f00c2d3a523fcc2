"""Whatever a service starts, and however it ends, nothing of an attempt is left running."""

import os
import shlex
import signal
import socket
import subprocess
import sys
import uuid
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workflow import processes
from workflow.processes import TOKEN_VARIABLE, Guard, free_ports, listener, members, owns_port, start, stop, sweep


@pytest.fixture
def token():
    """Return a token of its own, and end what a failing test left."""
    made = f"test-{uuid.uuid4().hex}"
    yield made
    sweep(made, grace_s=0.1)


def sleeper(name, token, tmp_path, script="sleep 60", **options):
    return start(name, ("sh", "-c", script), {}, tmp_path / f"{name}.log", token, **options)


@dataclass(frozen=True)
class Node:
    """A shell in a tree: deaf to SIGTERM or not, in a session of its own or not, gone before its children or not."""

    deaf: bool
    session: bool
    leaves: bool
    children: tuple["Node", ...]

    def script(self):
        lines = ["trap '' TERM INT"] if self.deaf else []
        for child in self.children:
            lines.append(f"{'setsid ' if child.session else ''}sh -c {shlex.quote(child.script())} &")
        lines.append("exit 0" if self.leaves else "while :; do sleep 1; done")
        return "\n".join(lines)


flags = st.booleans()
leaf = st.builds(Node, flags, flags, flags, st.just(()))
trees = st.builds(Node, flags, flags, flags, st.lists(leaf, max_size=2).map(tuple))


@settings(max_examples=15, deadline=None)
@given(trees)
def test_no_process_is_left_whatever_tree_a_service_grew(tmp_path_factory, tree):
    token = f"test-{uuid.uuid4().hex}"
    process = sleeper("tree", token, tmp_path_factory.mktemp("tree"), tree.script())
    try:
        stop(process, grace_s=0.2)
    finally:
        sweep(token, grace_s=0.2)
    assert not members(token)
    assert not process.alive


def test_stop_asks_first_and_kills_after_the_grace(token, tmp_path):
    polite = sleeper("polite", token, tmp_path, "trap 'echo bye; exit 7' TERM; echo up; while :; do sleep 0.1; done")
    assert processes.wait_until(lambda: "up" in polite.log.read_text(), 10)
    assert stop(polite, grace_s=10) == 7
    assert "bye" in polite.log.read_text()
    deaf = sleeper("deaf", token, tmp_path, "trap '' TERM; echo up; while :; do sleep 0.1; done")
    assert processes.wait_until(lambda: "up" in deaf.log.read_text(), 10)
    assert stop(deaf, grace_s=0.3) == -signal.SIGKILL


def test_stop_kills_a_group_whose_leader_is_gone(token, tmp_path):
    leader = sleeper("leader", token, tmp_path, "sleep 60 & exit 3")
    assert processes.wait_until(lambda: not leader.alive, 10)
    assert members(token)
    assert stop(leader, grace_s=0.1) == 3
    assert processes.wait_until(lambda: not members(token), 5)


def test_stop_runs_the_command_that_ends_what_a_daemon_holds(token, tmp_path):
    process = sleeper("boxed", token, tmp_path, after=("touch", str(tmp_path / "removed")))
    stop(process, grace_s=1)
    assert (tmp_path / "removed").exists()


def test_a_command_that_cannot_be_started_after_the_stop_does_not_hide_the_exit_code(token, tmp_path):
    process = sleeper("boxed", token, tmp_path, "exit 4", after=("no-such-command",))
    assert processes.wait_until(lambda: not process.alive, 10)
    assert stop(process, grace_s=1) == 4


def test_unset_variables_are_not_inherited_and_the_mark_is(token, tmp_path, monkeypatch):
    monkeypatch.setenv("TURNS_THE_ARM", "1")
    script = f'echo "${{TURNS_THE_ARM-gone}} $ADDED ${TOKEN_VARIABLE}"'
    argv = ("sh", "-c", script)
    process = start("env", argv, {"ADDED": "yes"}, tmp_path / "env.log", token, unset=("TURNS_THE_ARM",))
    process.popen.wait()
    assert process.log.read_text() == f"gone yes {token}\n"


def test_a_program_that_is_not_there_is_an_os_error(tmp_path, token):
    with pytest.raises(OSError, match="no-such-program"):
        start("x", ("no-such-program",), {}, tmp_path / "x.log", token)


def test_sweep_names_what_it_ended_and_spares_others(token, tmp_path):
    other = f"{token}-other"
    mine, theirs = sleeper("mine", token, tmp_path), sleeper("theirs", other, tmp_path)
    try:
        swept = sweep(token, grace_s=2)
        assert any(line.startswith(f"{mine.popen.pid} sh") for line in swept)
        assert theirs.alive
    finally:
        sweep(other, grace_s=2)


def test_guard_sweeps_when_its_owner_is_killed(token, tmp_path, project):
    script = (
        "import sys; from pathlib import Path; from workflow.processes import Guard, start\n"
        f"guard = Guard({token!r}, Path({str(project)!r}))\n"
        f"start('s', ('setsid', 'sleep', '60'), {{}}, Path({str(tmp_path / 's.log')!r}), {token!r})\n"
        "print('up', flush=True); sys.stdin.read()"
    )
    owner = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=project)
    assert owner.stdout.readline() == b"up\n"
    # While a process becomes another program it shows no environment for a moment.
    assert processes.wait_until(lambda: members(token) != [], 10)
    owner.kill()
    owner.wait()
    assert processes.wait_until(lambda: not members(token), 20)


RENAMED = """
import ctypes, os, sys, time
# What setproctitle does: the memory of the environment is overwritten.
fields = open("/proc/self/stat").read().rpartition(")")[2].split()
start, end = int(fields[47]), int(fields[48])
ctypes.memset(start, 0, end - start)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(60)
    time.sleep(60)
print("up", flush=True)
time.sleep(60)
"""


def test_a_program_that_renames_itself_is_found_by_its_session_and_its_children_by_their_parent(token, tmp_path):
    process = start("renamed", (sys.executable, "-c", RENAMED), {}, tmp_path / "r.log", token)
    assert processes.wait_until(lambda: "up" in process.log.read_text(), 20)
    assert members(token) == [], "the mark is gone"
    sessions = {process.popen.pid}
    assert processes.wait_until(lambda: len(members(token, sessions)) == 3, 10)
    sweep(token, grace_s=0.5, sessions=sessions)
    assert members(token, sessions) == []
    assert not process.alive


def test_guard_sweeps_what_it_was_told_of_and_runs_the_last_command(token, tmp_path, project):
    guard = Guard(token, project)
    process = start(
        "renamed",
        (sys.executable, "-c", RENAMED),
        {},
        tmp_path / "r.log",
        token,
        after=("touch", str(tmp_path / "done")),
    )
    guard.watch(process)
    assert processes.wait_until(lambda: "up" in process.log.read_text(), 20)
    guard.close()
    assert members(token, {process.popen.pid}) == []
    assert (tmp_path / "done").exists()


def test_guard_that_is_closed_has_swept(token, tmp_path, project):
    guard = Guard(token, project)
    sleeper("s", token, tmp_path)
    guard.close()
    assert not members(token)


def test_free_ports_are_distinct_and_can_be_bound():
    ports = free_ports(("a", "b", "c"))
    assert len(set(ports.values())) == 3
    for port in ports.values():
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", port))


def test_the_owner_of_a_port_is_the_process_its_child_or_its_mark(token, tmp_path):
    ports = free_ports(("direct", "detached"))
    serve = f"{sys.executable} -m http.server --bind 127.0.0.1"
    process = sleeper("web", token, tmp_path, f"setsid {serve} {ports['detached']} & {serve} {ports['direct']} & wait")
    for port in ports.values():
        assert processes.wait_until(lambda port=port: listener(port) is not None, 20)
        assert owns_port(process, port)
    stranger = sleeper("stranger", f"{token}-other", tmp_path)
    try:
        assert not owns_port(stranger, ports["direct"])
        assert not owns_port(process, free_ports(("none",))["none"])
    finally:
        sweep(f"{token}-other", grace_s=1)


def test_members_leaves_this_process_out(token, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    assert os.getpid() not in [process.pid for process in members(token)]
