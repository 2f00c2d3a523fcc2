"""A user's mistake ends at once, with one message that says where and what is allowed, and without a traceback."""

import pytest

from tests.end_to_end.conftest import copy_checkout

MASTER, LOG, SWEEP = "tests/end_to_end/master.yaml", "tests/end_to_end/changelog.yaml", "sweep.yaml"

MISTAKES = {
    "unknown key in the config": (
        SWEEP, "replay: {trace_set", "replay: {speed: 3, trace_set",
        ["sweep.yaml:3: replay.speed: unknown key 'speed'", "allowed: client, client_version, duration_s"],
    ),
    "unknown key in the search space": (
        MASTER, "precision: f16", "precison: f16",
        [f"{MASTER}:6: tiny-f16-local-llamacpp-test.precison: unknown key 'precison'", "did you mean 'precision'"],
    ),
    "duplicate key": (
        MASTER, "  precision: f16", "  precision: f16\n  precision: f8",
        [f"{MASTER}:7: ", "duplicate key 'precision'", "first on line 6"],
    ),
    "unknown backend": (
        MASTER, "name: llamacpp-ram", "name: llamacpp-rom",
        [f"{MASTER}:14: ", "'llamacpp-rom'", "llamacpp-ram"],
    ),
    "backend of another engine": (
        MASTER, "name: llamacpp-ram", "name: hicache",
        [f"{MASTER}:14: ", "hicache", "llamacpp-ram"],
    ),
    "missing trace set": (
        SWEEP, "trace_set: coding-agent", "trace_set: coding-agents",
        ["replay.trace_set", "no trace set 'coding-agents'", "allowed: coding-agent"],
    ),
    "wildcard without a match": (
        LOG, "[tiny-f16-local-llamacpp-test]", "[tiny-*-sglang]",
        [f"{LOG}:1: config-keys: 'tiny-*-sglang' matches no config key", "tiny-f16-local-llamacpp-test"],
    ),
    "an entry that selects nothing": (
        LOG, "[agentic-coding]", "[fixed-seq-len]",
        [f"{LOG}:1", "selects", "agentic-coding"],
    ),
    "not YAML": (
        LOG, "scenario-type:", "\tscenario-type:",
        [f"{LOG}:2: not YAML"],
    ),
    "a runner nobody knows": (
        MASTER, "cluster:local", "cluster:lokal",
        [f"{MASTER}:14: ", "cluster:lokal", "known: cluster:b200-dgxc, cluster:local"],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def checkout(project, tmp_path_factory):
    return copy_checkout(project, tmp_path_factory.mktemp("bad-input"))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_message(checkout, mistake):
    name, right, wrong, parts = MISTAKES[mistake]
    path = checkout.root / name
    text = path.read_text()
    assert right in text
    path.write_text(text.replace(right, wrong, 1))
    try:
        done = checkout.snakemake("--dry-run", check=False)
    finally:
        path.write_text(text)
    assert done.returncode == 1
    for part in parts:
        assert part in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 6, done.stderr


def test_a_missing_recorded_set_says_how_to_get_it(checkout):
    path = checkout.root / "configs/traces.yaml"
    text = path.read_text()
    path.write_text(
        text
        + "  recorded-set:\n    kind: recorded\n    path: nowhere.tar.xz\n    source: callanjfox/kv-cache-tester\n"
        + f"    revision: 94f6046\n    licence: Apache-2.0\n    sha256: {'f' * 64}\n"
    )
    try:
        done = checkout.snakemake("--config", "replay={trace_set: recorded-set}", "--until", "trace_set", check=False)
    finally:
        path.write_text(text)
    assert done.returncode
    assert "recorded traces are not at" in done.stderr
    assert "fetch callanjfox/kv-cache-tester at 94f6046 (Apache-2.0)" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_point_is_refused(checkout):
    done = checkout.snakemake("results/runs/tiny-typo/run.json", check=False)
    assert done.returncode
    assert "MissingRuleException" in done.stderr
