"""A double of Ascend's Apex, whose wheel no registry has: real signatures and rules, and a record of the calls.

Put the folder that holds this package on PYTHONPATH. Written from the behaviour of NVIDIA's apex.amp at commit
4ef930c1 with Ascend's npu.patch on it; nothing of it is copied, and no speed can be learned from it.
"""

import importlib

from apex import amp

__all__ = ["amp", "optimizers"]
__version__ = "0.1+ascend"


def __getattr__(name):
    if name == "optimizers":  # not before it is asked for: it needs torch_npu
        return importlib.import_module("apex.optimizers")
    raise AttributeError(f"module 'apex' has no attribute {name!r}")
