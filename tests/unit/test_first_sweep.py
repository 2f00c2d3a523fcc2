"""docs/first-sweep.md and the profiles say what the code does."""

import re
from pathlib import Path

import pytest
import yaml

from workflow import yamlfile
from workflow.config import Clusters
from workflow.failures import FailureClass
from workflow.jobs import SCHEDULER_CLASSES
from workflow.status import SELECTORS


@pytest.fixture(scope="module")
def text(project):
    return (project / "docs/first-sweep.md").read_text()


def test_the_example_is_a_valid_clusters_file_that_shows_every_key(text):
    block = re.search(r"```yaml\n(clusters:.*?)```", text, re.DOTALL)[1]
    path = Path("docs/first-sweep.md")
    cluster = yamlfile.validate(Clusters, yamlfile.parse(block.encode(), path), path).clusters["cluster:b200-dgxc"]
    shown = set(re.findall(r"^ +([a-z_]+):", block, re.MULTILINE))
    assert set(type(cluster.slurm).model_fields) | set(type(cluster).model_fields) <= shown


def test_what_to_do_about_each_class_that_only_slurm_knows(text):
    rows = set(re.findall(r"^\| `(\w+)` \| \S", text, re.MULTILINE))
    assert rows <= {kind.value for kind in FailureClass}
    assert {kind.value for kind in SCHEDULER_CLASSES} <= rows


def test_every_key_of_a_selection_is_named(text):
    sentence = re.search(r"Keys of `--select` are (.*?);", text, re.DOTALL)[1]
    assert tuple(re.findall(r"`(\w+)`", sentence)) == SELECTORS


def settings(project, name):
    return yaml.safe_load((project / f"configs/profiles/{name}/config.yaml").read_text())


def test_the_literal_command_finds_the_profile(project):
    assert (project / "slurm").is_symlink()
    assert (project / "slurm").resolve() == project / "configs/profiles/slurm"


@pytest.mark.parametrize("name", ["slurm", "cluster-generic"])
def test_s13_s14_s17_what_a_profile_must_and_must_not_say(project, name):
    profile = settings(project, name)
    assert "keep-incomplete" not in profile, "S13: a failed output would count as complete"
    assert profile["rerun-incomplete"] is True, "S14: a job that was cut off would stop the next run"
    assert "code" not in profile["rerun-triggers"], "S17: an edit would buy GPU hours again"
    assert profile["keep-going"] is True, "S8: one refused job would end all others"


def test_s1_squeue_is_asked_since_accounting_may_be_off(project):
    profile = settings(project, "slurm")
    assert profile["slurm-status-command"] == "squeue"
    # The plugin goes back to sacct by itself where Slurm forgets jobs sooner than this; MinJobAge is 300 s by default.
    assert 3 * profile["slurm-init-seconds-before-status-checks"] < 300


def test_s7_no_rule_retries_by_itself(project):
    """A rule's retries also count inside of each job: n x n tries."""
    rules = [*project.glob("rules/*.smk"), project / "Snakefile"]
    assert not [path.name for path in rules if re.search(r"^\s*retries:", path.read_text(), re.MULTILINE)]


def test_every_line_of_the_slurm_profile_is_explained(project):
    lines = (project / "configs/profiles/slurm/config.yaml").read_text().splitlines()
    for i, line in enumerate(lines):
        if re.match(r"^[a-z-]+:", line):
            assert lines[i - 1].startswith("# "), f"{line} has no explanation"


def test_only_measuring_is_submitted(project):
    """Light rules run beside Snakemake: compute nodes often have no network, and GPUs must not wait for a figure."""
    rules, local = set(), set()
    for path in [*project.glob("rules/*.smk"), project / "Snakefile"]:
        for block in re.findall(r"^localrules:\n((?:    \w+,\n)+)", path.read_text(), re.MULTILINE):
            local |= set(re.findall(r"\w+", block))
        rules |= set(re.findall(r"^rule (\w+):|^use rule \w+ as (\w+) with:", path.read_text(), re.MULTILINE))
    names = {one or other for one, other in rules}
    # `all` has nothing to run.
    assert names - local == {"run_point", "run_shared", "all"}
