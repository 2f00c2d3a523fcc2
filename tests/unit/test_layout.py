"""The promises that the tree makes: imports, form of rules, one list of dependencies, no machine."""

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from workflow.config import config_schema

# Upstream first; a module may import from its own line and from lines above.
CHAIN = (
    {"contract"},
    {"yamlfile"},
    {"config"},
    {"changelog", "revision"},
    {"searchspace"},
    {"rows"},
    {"matrix", "inferencex_matrix", "entrylint", "lint"},
    {"serving"},
    {"engines", "backends", "node", "shell", "versioned"},
    {"recipes"},
    {"traces", "environments", "models", "model_making"},
    {"plans", "clients"},
    {"points"},
    {"failures"},
    {"images"},
    {"launchers"},
    {"allocation"},
    {"sharing"},
    {"preflight", "sweep"},
    {"unbundle"},
    {"readers"},
    {"replay", "processes", "endpoints"},
    {"parts", "lease", "leftovers", "scratch"},
    {"bundle"},
    {"nodelock", "patch_wheel"},
    {"attempt"},
    {"startup", "integrity"},
    {"watch"},
    {"jobs"},
    {"runs"},
    {"turns"},
    {"adoption"},
    {"definitions"},
    {"evidence"},
    {"verdict"},
    {"metrics", "inferencex_aggregate"},
    {"timeline"},
    {"measured"},
    {"status"},
    {"gallery"},
    {"intervals"},
    {"comparison"},
    {"explanation", "fairness"},
    {"style", "figures", "report"},
)


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "workflow":
                yield from (f"workflow.{alias.name}" for alias in node.names)
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def rank(module):
    ranks = [i for i, names in enumerate(CHAIN) if module in names]
    assert ranks, f"workflow/{module} has no place in CHAIN"
    return ranks[0]


def test_modules_import_only_from_upstream(project):
    package = project / "workflow"
    for path in sorted(package.rglob("*.py")):
        own = path.relative_to(package).parts[0].removesuffix(".py")
        if own == "__init__":
            continue
        for module in imports_of(path):
            parts = module.split(".")
            if parts[0] == "workflow" and len(parts) > 1 and parts[1] != own:
                assert rank(parts[1]) <= rank(own), f"{path.name} imports {module}, which is downstream of it"


def test_nothing_in_the_package_imports_snakemake(project):
    for path in (project / "workflow").rglob("*.py"):
        assert not any(module.split(".")[0] == "snakemake" for module in imports_of(path)), path


def test_rules_never_rebind_snakemakes_workflow_object(project):
    for path in [project / "Snakefile", *(project / "rules").glob("*.smk")]:
        assert not re.search(r"^\s*import workflow", path.read_text(), re.MULTILINE), path


def test_every_rule_names_an_environment_file_that_exists(project):
    # A missing one fails a job only after it ran: the GPU hour is then paid and lost.
    for path in (project / "rules").glob("*.smk"):
        text = path.read_text()
        rules = len(re.findall(r"^rule ", text, re.MULTILINE))
        named = re.findall(r'conda:\n\s+"([^"]+)"', text)
        with_jobs = rules - len(re.findall(r"^rule \w+:\n    input:\n(?:        .*\n)+(?=\n|\Z)", text, re.MULTILINE))
        assert len(named) >= with_jobs, path
        for name in named:
            assert (path.parent / name).is_file(), f"{path}: {name}"


def test_scripts_are_adaptors(project):
    for path in (project / "scripts").glob("*.py"):
        assert len(path.read_text().splitlines()) <= 24, path


def requirement(text):
    name, rest = re.fullmatch(r"([A-Za-z0-9_.-]+)\s*(.*)", text.strip()).groups()
    return re.sub(r"[-_.]+", "-", name).lower(), rest.replace(" ", "")


def test_dependencies_are_the_same_in_pyproject_environment_and_lock(project):
    declared = dict(
        requirement(item) for item in tomllib.loads((project / "pyproject.toml").read_text())["project"]["dependencies"]
    )
    conda = yaml.safe_load((project / "environment.yml").read_text())["dependencies"]
    pip = next(item["pip"] for item in conda if isinstance(item, dict))
    assert dict(requirement(item) for item in pip) == declared
    lock = (project / "requirements.lock").read_text().splitlines()
    locked = {
        requirement(line.split(";")[0])[0]: line for line in lock if line.strip() and not line.lstrip().startswith("#")
    }
    assert declared.keys() <= locked.keys()
    for name, wanted in declared.items():
        if wanted.startswith("=="):
            assert f"=={wanted[2:]}" in locked[name], name


def test_config_schema_is_current(project):
    path = project / "configs" / "config.schema.json"
    assert path.read_text() == config_schema(), "make schema"


def tracked(project):
    done = subprocess.run(["git", "-C", project, "ls-files"], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a git checkout")
    return [project / name for name in done.stdout.splitlines()]


def test_nothing_names_a_machine_or_is_left_to_do(project):
    left = "|".join(("TO" + "DO", "FIX" + "ME", "/wo" + "rk/", "/ro" + "ot/"))
    for path in tracked(project):
        if path.suffix in {".py", ".smk", ".md", ".yaml", ".yml", ".toml", ".sh"} or path.name in {
            "Snakefile",
            "Makefile",
        }:
            found = re.search(left, path.read_text())
            assert not found, f"{path}: {found[0]}"


def test_links_in_docs_lead_somewhere(project):
    for path in [project / "README.md", *(project / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text()):
            if not target.startswith("http"):
                assert (path.parent / target).exists(), f"{path}: {target}"


def test_messages_point_at_docs_that_exist(project):
    for path in [*(project / "workflow").rglob("*.py"), *(project / "rules").glob("*.smk")]:
        for target in re.findall(r"\bdocs/[a-z0-9_-]+\.md", path.read_text()):
            assert (project / target).exists(), f"{path}: {target}"


def test_stage_names_are_the_same_everywhere(project):
    for stage in ("points", "runs", "metrics", "comparison", "figures"):
        assert (project / "rules" / f"{stage}.smk").is_file()
        module = project / "workflow" / stage
        assert module.with_suffix(".py").is_file() or (module / "__init__.py").is_file()


def test_snakefile_is_a_table_of_contents(project: Path):
    assert len((project / "Snakefile").read_text().splitlines()) <= 60
