"""Options of the device that are attributes or strings in the real package."""

from torch_npu import _C

_ALLOWED_VALUES = {
    "ACL_PRECISION_MODE": ["allow_fp32_to_fp16", "must_keep_origin_dtype"],
    "ACL_OP_SELECT_IMPL_MODE": ["high_performance", "high_precision"],
    "ACL_OP_DEBUG_LEVEL": ["0", "1", "2", "3", "4"],
    "ACL_OP_COMPILER_CACHE_MODE": ["disable", "enable", "force"],
    "MM_BMM_ND_ENABLE": ["enable", "disable"],
}
_jit_compile = _C.saturates()  # the first generation compiles each shape by default


def set_option(option):
    """Sets options by name; those that change no number here are checked and otherwise ignored.

    Raises:
        TypeError: `option` is not a dict.
        ValueError: an option has a value that it does not know.
    """
    if not isinstance(option, dict):
        raise TypeError("npu option must be a dict.")
    for name, value in option.items():
        if str(value) not in _ALLOWED_VALUES.get(name, [str(value)]):
            raise ValueError(f"value of {name} should be in {_ALLOWED_VALUES[name]} but got {value}")
    if "ACL_PRECISION_MODE" in option:
        _C.set_float32_as_half(option["ACL_PRECISION_MODE"] == "allow_fp32_to_fp16")


def set_compile_mode(jit_compile=False):
    global _jit_compile
    _jit_compile = bool(jit_compile)


def is_jit_compile_false() -> bool:
    return not _jit_compile


class _HF32Switch:
    """`allow_hf32` of `torch.npu.conv` and `torch.npu.matmul`; any other attribute reads as None."""

    def __init__(self, default, apply):
        super().__setattr__("_allowed", default)
        super().__setattr__("_apply", apply)

    def __setattr__(self, name, value):
        if name != "allow_hf32":
            return
        if not isinstance(value, bool):
            raise TypeError(f"allow_hf32 must be a bool, but got {type(value).__name__}")
        super().__setattr__("_allowed", value)
        self._apply(value)

    def __getattr__(self, name):
        return self._allowed if name == "allow_hf32" else None


class _Config:
    """`torch.npu.config`: write-only, as in the real package."""

    def __setattr__(self, name, value):
        pass


conv = _HF32Switch(True, _C.set_conv_hf32)
matmul = _HF32Switch(False, _C.set_matmul_hf32)
config = _Config()
