"""Print the versions of installed distributions, then become the command.

`versioned.py vllm lmcache -- vllm serve ...` runs in the Python of the image or environment that serves, so it needs
nothing beside the standard library of 3.10. A name may list alternatives, `mooncake=mooncake-cuda,mooncake-cpu`: the
first one that is installed counts. The lines are the first of the service's log, minutes before a large checkpoint is
loaded.
"""

import os
import sys

if __name__ == "__main__":
    # Python puts the script's own folder first; its modules must not shadow the standard library's.
    del sys.path[0]

from importlib.metadata import PackageNotFoundError, version


def installed(names: list[str]) -> str:
    """Return the version of the first distribution that is installed, else `not-installed`."""
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "not-installed"


def main(arguments: list[str]) -> None:
    """Print a line for each distribution and replace this process by the command after `--`."""
    if "--" not in arguments or arguments[-1] == "--":
        sys.exit("usage: versioned.py [NAME | NAME=DISTRIBUTION,...] ... -- COMMAND ...")
    split = arguments.index("--")
    for item in arguments[:split]:
        name, _, alternatives = item.partition("=")
        print(f"version of {name} is {installed((alternatives or name).split(','))}", flush=True)
    command = arguments[split + 1 :]
    # An environment is called by the path of its Python; its other programs are beside it, and not on the PATH.
    beside = os.path.dirname(sys.executable)  # noqa: PTH120 - the link itself: what it points to is another Python
    os.environ["PATH"] = os.pathsep.join((beside, os.environ.get("PATH", os.defpath)))
    try:
        os.execvp(command[0], command)  # noqa: S606 - this process becomes the command; no shell
    except OSError as error:
        sys.exit(f"cannot start {command[0]}: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
