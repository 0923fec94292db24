"""A simulated torch_npu: the device `npu` and the backend `hccl` on plain host memory, for rehearsals and tests.

Put the folder that holds this package first on PYTHONPATH. README.md, beside
the package, says what is played and what cannot be proven with it.
"""

import os

# as the real package does: torch must not load us a second time while we load torch
_autoload_setting = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD")
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch  # noqa: E402

if _autoload_setting is None:
    del os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"]
else:
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = _autoload_setting

__version__ = torch.__version__.partition("+")[0] + "+simulated"  # fits the torch that is there
SIMULATED = True

if os.environ.get("NPU_SIMULATOR_FAULT", "").partition(":")[0] == "no_libhccl":
    raise ImportError("libhccl.so: cannot open shared object file: No such file or directory")
if torch._C._get_accelerator().type not in ("cpu", "npu"):
    raise RuntimeError(
        f"Two accelerators cannot be used at the same time in PyTorch: npu and {torch._C._get_accelerator().type} "
        "(ERR00007). Hide the other one (CUDA_VISIBLE_DEVICES=) to simulate NPUs."
    )

from torch_npu._build import load_extension  # noqa: E402

_C = load_extension()

torch.utils.rename_privateuse1_backend("npu")
from torch_npu import npu, optim, simulator  # noqa: E402, F401
from torch_npu._operators import (  # noqa: E402, F401
    get_npu_format,
    npu_clear_float_status,
    npu_format_cast,
    npu_get_float_status,
)

torch._register_device_module("npu", npu)
torch.utils.generate_methods_for_privateuse1_backend(
    for_tensor=True,
    for_module=True,
    for_storage=True,
    unsupported_dtype=[torch.quint8, torch.quint4x2, torch.quint2x4, torch.qint32, torch.qint8],
)
torch.nn.parameter.UninitializedTensorMixin._allowed_methods.append(torch.Tensor.npu)

from torch_npu import _distributed, _sync_batch_norm  # noqa: E402, F401

_distributed.register_hccl()
