"""Lock an environment for a node: what the node's own Python has is taken as it is, whatever other packages ask for.

`python -m workflow.nodelock --node NODE.yaml NAME.in ...` writes NAME.txt beside each. A `.in` file holds requirements,
a line each, and may say `# without: A, B` (distributions that are asked for and not installed: nothing that a point
runs imports them) and `# own: C` (the node's version does not do, the environment brings its own).
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from workflow import yamlfile
from workflow.bundle import Node
from workflow.contract import InputError, reports_input_errors, write_atomic
from workflow.environments import FIND_LINKS, normalised


def overrides(wanted: Path, node: Node) -> list[str]:
    """Return what the resolver has to take as given, a requirement each; raises InputError for an unknown directive."""
    said: dict[str, set[str]] = {"without": set(), "own": set()}
    for number, line in enumerate(wanted.read_text().splitlines(), 1):
        if (found := re.fullmatch(r"#\s*([a-z]+):\s*(.+)", line.strip())) is None:
            continue
        if found[1] not in said:
            raise InputError(f"found {found[1]!r}", file=wanted, line=number, allowed=", ".join(said))
        said[found[1]] |= {normalised(name.strip()) for name in found[2].split(",")}
    have = {normalised(name): version for name, version in node.packages.items()}
    if missing := sorted(said["own"] - have.keys()):
        raise InputError(f"the node has no {', '.join(missing)}", file=wanted, key="own", do="take it out")
    given = [f"{name}=={version}" for name, version in sorted(have.items()) if name not in said["own"]]
    # A marker that never holds takes a requirement away.
    return [*given, *(f"{name} ; python_version < '0'" for name in sorted(said["without"]))]


def lock(wanted: Path, node: Node) -> str:
    """Return the text of an environment's lock; raises InputError with the resolver's message."""
    minor = node.python.rpartition(".")[0]
    platform = f"x86_64-manylinux_{node.glibc.replace('.', '_')}"
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as given:
        given.write("\n".join(overrides(wanted, node)) + "\n")
        given.flush()
        argv = [str(Path(sys.executable).parent / "uv"), "pip", "compile", "--quiet", "--no-annotate", "--no-header"]
        argv += ["--python-version", minor, "--python-platform", platform, "--override", given.name, wanted.name]
        # A folder of wheels is named as seen from the file.
        done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=wanted.parent)
    if done.returncode:
        raise InputError(f"uv finds no solution:\n{done.stderr.strip()[-1500:]}", file=wanted)
    pinned = [line.split(";")[0].strip() for line in done.stdout.splitlines() if "==" in line]
    folders = [match[0] for line in wanted.read_text().splitlines() if (match := FIND_LINKS.match(line))]
    head = [
        f"# Made from {wanted.name} by `python -m workflow.nodelock`; what the node has is pinned too.",
        f"# python: =={minor}.*",
    ]
    return "\n".join([*head, *folders, *pinned]) + "\n"


@reports_input_errors
def main(arguments: list[str] | None = None) -> int:
    """Write the locks; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m workflow.nodelock", description=__doc__)
    parser.add_argument("wanted", nargs="+", type=Path, help="NAME.in")
    parser.add_argument("--node", type=Path, required=True, help="what the node has")
    options = parser.parse_args(arguments)
    node = yamlfile.validate(Node, yamlfile.load(options.node), options.node)
    for wanted in options.wanted:
        write_atomic(wanted.with_suffix(".txt"), lock(wanted, node).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
