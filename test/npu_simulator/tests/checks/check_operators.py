"""PyTorch's own database of operators (OpInfo): results and gradients on the NPU against the CPU.

In float32, or the first type of an operator that has no float32; at most three
samples of each, so that it takes two minutes. An operator counts only if a
result of it was compared. What fails is listed with its reason.
"""

import warnings

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

import torch_npu  # noqa: F401

NUM_SAMPLES = 3
NUM_OTHERS = 18  # that fail, or of which no result can be compared: at least 685 of the 703 in torch 2.14 agree
EXPECTED_FAILURES = {
    "to_sparse": "sparse tensors are refused",
    "sparse.mm.reduce": "sparse tensors are refused",
    "sparse.sampled_addmm": "sparse tensors are refused",
    "tensor_split": "wants its indices on the CPU, as on any accelerator",
    "as_strided.partial_views": "the sample is a view of a larger tensor, whose rest does not move with it",
    "double": "there is no float64",
    "float_power": "there is no float64",
}


def to_npu(value):
    if isinstance(value, torch.Tensor):
        return value.detach().to("npu").requires_grad_(value.requires_grad)
    return "npu" if value in ("cpu", torch.device("cpu")) else value


def dense_tensors(value):
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return [tensor for tensor in tensors if tensor.layout == torch.strided and not tensor.is_quantized]


def gradients(results, arguments):
    """Gradients of the sum of all results, or None where there are none to have."""
    inputs = [tensor for tensor in dense_tensors(arguments) if tensor.requires_grad]
    outputs = [tensor for tensor in dense_tensors(results) if tensor.requires_grad]
    if not inputs or not outputs:
        return None
    total = [tensor.abs().sum() if tensor.is_complex() else tensor.sum() for tensor in outputs]
    return torch.autograd.grad(total, inputs, allow_unused=True)


def close(actual, expected, tolerance):
    if expected.is_floating_point() and expected.element_size() == 1:  # float8 compares by bits only
        actual, expected = actual.float(), expected.float()
    torch.testing.assert_close(actual.detach().cpu(), expected.detach(), equal_nan=True, rtol=tolerance, atol=tolerance)


def compare(op, sample):
    """Compares one sample; gives whether there was anything to compare."""

    def seeded_call(arguments):
        torch.manual_seed(0)
        first, rest, named = arguments
        return op.op(first, *rest, **named)

    on_cpu = (sample.input, sample.args, sample.kwargs)
    on_npu = tree_map(to_npu, on_cpu)
    if isinstance(sample.input, torch.Tensor) and not sample.input.requires_grad:
        on_cpu = (sample.input.clone(), sample.args, sample.kwargs)
    try:
        expected = seeded_call(on_cpu)
    except Exception:
        return False  # not a sample for the CPU
    actual = seeded_call(on_npu)
    for result, reference in zip(dense_tensors(actual), dense_tensors(expected), strict=True):
        assert result.device.type == "npu", f"a result on {result.device}"
        if "empty" not in op.name:
            close(result, reference, 1e-4)
    if op.supports_autograd:
        try:
            expected_gradients = gradients(expected, on_cpu)
        except Exception:
            return True
        for result, reference in zip(gradients(actual, on_npu) or (), expected_gradients or ()):
            if reference is not None and reference.layout == torch.strided:
                close(result, reference, 1e-3)
    return True


def test_operators():
    warnings.simplefilter("ignore")
    torch.npu.conv.allow_hf32 = False
    passed, failed = [], {}
    for op in op_db:
        name = op.name + ("." + op.variant_test_name if op.variant_test_name else "")
        if not op.dtypes:
            continue
        dtype = torch.float32 if torch.float32 in op.dtypes else sorted(op.dtypes, key=str)[0]
        with_gradient = dtype.is_floating_point and op.supports_autograd
        try:
            samples = list(op.sample_inputs("cpu", dtype, requires_grad=with_gradient))[:NUM_SAMPLES]
            compared = [compare(op, sample) for sample in samples]
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:160]
            continue
        if any(compared):
            passed.append(name)
    print(f"\n{len(passed)} of {len(op_db)} operators agree, {len(failed)} do not:")
    for name, reason in failed.items():
        print(f"  {name}: {EXPECTED_FAILURES.get(name, 'UNEXPECTED')} ({reason})")
    assert sorted(failed) == sorted(EXPECTED_FAILURES)
    assert len(passed) >= len(op_db) - NUM_OTHERS
