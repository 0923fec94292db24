"""Compiles the C++ half once for each torch, Python and state of the sources, and loads it."""

import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

SOURCES = Path(__file__).resolve().parent / "csrc"
LIBRARY = "_C" + sysconfig.get_config_var("EXT_SUFFIX")


def cache_folder() -> Path:
    """The folder for this torch, this Python and these sources, under $NPU_SIMULATOR_CACHE or the user's cache."""
    import torch

    digest = hashlib.sha256()
    for source in sorted(SOURCES.glob("*.*")):
        digest.update(source.name.encode() + source.read_bytes())
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "npu_simulator"
    root = Path(os.environ.get("NPU_SIMULATOR_CACHE") or user_cache)
    return root / f"torch-{torch.__version__}-{sys.implementation.cache_tag}-{digest.hexdigest()[:16]}"


def load_extension() -> ModuleType:
    """Gives the module `torch_npu._C`, compiling it first where no process has done so yet.

    Raises:
        ImportError: it cannot be compiled here; the text says what is missing.
    """
    folder = cache_folder()
    if not (folder / LIBRARY).exists():
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the ranks of a job all come here at once
            if not (folder / LIBRARY).exists():
                _compile(folder)
    spec = importlib.util.spec_from_file_location("torch_npu._C", folder / LIBRARY)
    module = importlib.util.module_from_spec(spec)
    sys.modules["torch_npu._C"] = module
    spec.loader.exec_module(module)
    sys.modules["torch_npu._C._distributed_c10d"] = module._distributed_c10d
    return module


def _compile(folder: Path) -> None:
    compiler = os.environ.get("CXX", "c++")  # as torch.utils.cpp_extension chooses it
    if subprocess.run(["/bin/sh", "-c", f"command -v {compiler}"], capture_output=True).returncode:
        raise ImportError(
            f"the simulated NPU is compiled at its first use, and there is no C++ compiler `{compiler}`; "
            "install g++ 11 or newer, or name yours in the environment variable CXX"
        )
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        raise ImportError(
            "the simulated NPU is compiled at its first use, and Python.h is missing; "
            f"install the development files of Python {sys.version_info.major}.{sys.version_info.minor} (python3-dev)"
        )
    print("torch_npu (simulated): compiling, once, about a minute ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        command = [sys.executable, str(SOURCES / "setup.py"), "build_ext"]
        command += [f"--build-lib={temporary}", f"--build-temp={temporary}/objects"]
        process = subprocess.run(command, cwd=temporary, env=environment, capture_output=True, text=True)
        if process.returncode:
            report = (process.stdout + process.stderr)[-6000:]
            raise ImportError(f"the simulated NPU does not compile:\n{report}")
        os.replace(Path(temporary, LIBRARY), folder / LIBRARY)
