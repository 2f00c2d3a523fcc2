"""Read points' serve commands as vLLM will, without a GPU: a bad flag is then found before one is paid for.

`ENVIRONMENT/bin/python workflow/engines/vllm_check.py --model FOLDER POINT.json ...` runs in the environment that
serves. Each command goes through vLLM's own parser into its whole configuration, and the KV connector's class is
imported, with everything that it imports; then the modules of the engine's process are. A GPU is pretended for that:
its capability and its memory, and nothing can be computed on it. Where there is no driver, a library that fails every
call stands for it; making one takes `nm` and `cc`.
"""

import argparse
import ctypes
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Python puts the script's own folder first; its modules must not shadow vLLM's.
    del sys.path[0]

ENGINE_MODULES = ("vllm.v1.engine.core", "vllm.v1.worker.gpu_worker", "vllm.v1.worker.gpu_model_runner")
"""What the engine's own process imports after it was started: a package that is missing there costs a whole start."""


def driver_is_here() -> bool:
    """Tell whether NVIDIA's driver library can be loaded."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def write_driver(folder: Path) -> None:
    """Write a `libcuda.so.1` whose functions all fail, with those that vLLM's libraries look for when they are loaded.

    Raises OSError or CalledProcessError where nm or cc is missing or fails.
    """
    spec = importlib.util.find_spec("vllm")
    site = Path(spec.origin).parents[1] if spec and spec.origin else Path()
    libraries = [str(path) for name in ("vllm", "lmcache", "mooncake") for path in (site / name).rglob("*.so")]
    listed = subprocess.run(["nm", "-D", "-u", *libraries], capture_output=True, text=True, check=False).stdout
    names = sorted({"cuInit", *re.findall(r"\bU (cu[A-Z]\w*)", listed)})
    # 100 is CUDA_ERROR_NO_DEVICE.
    (folder / "driver.c").write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in names))
    argv = ["cc", "-w", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(folder / "libcuda.so.1")]
    subprocess.run([*argv, str(folder / "driver.c")], check=True)


def pretend_gpu(capability: tuple[int, int], memory_gib: float) -> None:
    """Make vLLM see one GPU; must be called before a part of it has asked."""
    platforms: Any = importlib.import_module("vllm.platforms")
    cuda: Any = importlib.import_module("vllm.platforms.cuda")
    interface: Any = importlib.import_module("vllm.platforms.interface")

    class Pretended(cuda.NonNvmlCudaPlatform):  # type: ignore[misc]
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return interface.DeviceCapability(*capability)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "pretended"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return int(memory_gib * 2**30)

        @classmethod
        def device_count(cls) -> int:
            return 1

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 132

        @classmethod
        def is_integrated_gpu(cls, device_id: int = 0) -> bool:
            return False

    platforms._current_platform = Pretended()


def command_of(point: dict[str, Any], model: Path, scratch: Path) -> tuple[list[str], dict[str, str]]:
    """Return the words after `vllm serve` and the environment of a point, placeholders filled with stand-ins."""

    def fill(text: str) -> str:
        text = re.sub(r"<port:[a-z0-9-]+>", "5555", text)
        text = text.replace("<path:model>", str(model))
        return re.sub(r"<path:([a-z0-9-]+)>", lambda found: str(scratch / found[1]), text)

    service = point["plan"]["engine"]
    argv = [fill(word) for word in service["argv"]]
    return argv[argv.index("serve") + 1 :], {name: fill(value) for name, value in service["env"].items()}


def check(argv: list[str]) -> str:
    """Build the configuration of a command and import what it asks for; return what it came to, in words."""
    cli = importlib.import_module("vllm.entrypoints.openai.cli_args")
    utils = importlib.import_module("vllm.utils.argparse_utils")
    arguments = importlib.import_module("vllm.engine.arg_utils")
    factory = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.factory")
    parsed = cli.make_arg_parser(utils.FlexibleArgumentParser()).parse_args(argv)
    parsed.model = parsed.model_tag or parsed.model
    cli.validate_parsed_serve_args(parsed)
    config = arguments.AsyncEngineArgs.from_cli_args(parsed).create_engine_config()
    transfer = config.kv_transfer_config
    connector = None if transfer is None else factory.KVConnectorFactory.get_connector_class(transfer)
    for module in ENGINE_MODULES:
        importlib.import_module(module)
    backend = config.attention_config.backend
    return (
        f"{config.model_config.max_model_len} tokens of context, attention {getattr(backend, 'name', backend)}, "
        f"connector {'none' if connector is None else f'{connector.__module__}.{connector.__name__}'}"
    )


def main() -> int:
    """Check every point in a process of its own, since vLLM reads its variables once; return 1 if one is refused."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("points", nargs="+", type=Path)
    parser.add_argument("--model", type=Path, required=True, help="folder of the checkpoint, weights are not read")
    parser.add_argument("--capability", default="9.0", help="compute capability of the GPU to pretend")
    parser.add_argument("--memory-gib", type=float, default=139.0, help="memory of the GPU to pretend")
    options = parser.parse_args()
    if not driver_is_here():
        if "LD_PRELOAD" in os.environ:
            parser.error("the library that stands for the driver cannot be loaded")
        with tempfile.TemporaryDirectory() as folder:
            write_driver(Path(folder))
            env = {**os.environ, "LD_PRELOAD": f"{folder}/libcuda.so.1"}
            return subprocess.run([sys.executable, *sys.argv], env=env, check=False).returncode
    major, minor = (int(part) for part in options.capability.split("."))
    # Once, in the parent: it takes longer than all the rest.
    pretend_gpu((major, minor), options.memory_gib)
    failed = 0
    for path in options.points:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                with tempfile.TemporaryDirectory() as scratch:
                    argv, env = command_of(json.loads(path.read_text()), options.model, Path(scratch))
                    os.environ.update(env)
                    print(f"{path.stem}: {check(argv)}", flush=True)
                status = 0
            except SystemExit as error:
                print(f"{path.stem}: refused: vLLM's parser ended with {error.code}", flush=True)
            except Exception:
                print(f"{path.stem}: refused:\n{traceback.format_exc()}", flush=True)
            os._exit(status)
        failed += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
