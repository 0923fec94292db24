"""Compiles torch_npu._C; run by torch_npu/_build.py in a process of its own, which keeps setuptools out of others."""

from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

# ninja is used where it is installed, and not needed
FOLDER = Path(__file__).resolve().parent
UNITS = [str(FOLDER / name) for name in ("unit_device.cpp", "unit_torch.cpp")]
FLAGS = ["-O1", "-g0", "-DAT_PER_OPERATOR_HEADERS", "-DUSE_C10D_GLOO"]

setup(
    name="npu_simulator",
    ext_modules=[CppExtension("_C", UNITS, extra_compile_args=FLAGS)],
    cmdclass={"build_ext": BuildExtension},
)
