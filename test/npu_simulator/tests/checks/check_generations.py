"""What differs between chips, and the arithmetic of both. NPU_SIMULATOR_SOC says which chip is played."""

import warnings

import pytest
import torch
import torch.nn.functional as F

import torch_npu

FIRST_GENERATION = torch.npu.get_device_name() == "Ascend910A"
first_generation = pytest.mark.skipif(not FIRST_GENERATION, reason="needs Ascend910A")
second_generation = pytest.mark.skipif(FIRST_GENERATION, reason="needs Ascend910B3")


@pytest.fixture(autouse=True)
def defaults():
    yield
    torch.npu.conv.allow_hf32 = True
    torch.npu.matmul.allow_hf32 = False
    torch.npu.set_option({"ACL_PRECISION_MODE": "allow_fp32_to_fp16" if FIRST_GENERATION else "must_keep_origin_dtype"})
    if FIRST_GENERATION:
        torch.npu.clear_npu_overflow_flag()


def kept_bits(device_result):
    """Bits of mantissa that the device kept of 1 + 2**-n: the largest n that is not lost."""
    return max(n for n in range(1, 24) if device_result(torch.tensor(1 + 2.0**-n)) != 1)


# ---- both chips


def test_a_cast_to_float64_gives_float32_with_one_warning():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [torch.ones(2, device="npu").double(), torch.ones(2, device="npu").to(torch.float64)]
    assert [result.dtype for result in results] == [torch.float32] * 2
    assert len([warning for warning in caught if "double" in str(warning.message)]) == 1


def test_float64_has_no_products():
    x = torch.ones(4, 4, dtype=torch.float64).to("npu")
    assert x.dtype == torch.float64 and (x + x).sum() == 32
    for product in (lambda: x.mm(x), lambda: F.linear(x, x), lambda: F.conv2d(x.view(1, 1, 4, 4), x.view(1, 1, 4, 4))):
        with pytest.raises(NotImplementedError, match="float64"):
            product()
    with pytest.raises(NotImplementedError, match="float64"):
        F.batch_norm(x, None, None, training=True)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse().npu(),
        lambda: torch.eye(3).npu().to_sparse(),
        lambda: torch.eye(3).npu().to_sparse_csr(),
        lambda: torch.sparse_coo_tensor([[0], [1]], [1.0], (2, 2), device="npu"),
    ],
)
def test_sparse_tensors_are_refused(make):
    with pytest.raises(NotImplementedError, match="(?i)sparse"):
        make()


def test_quantized_tensors_are_refused():
    with pytest.raises((NotImplementedError, RuntimeError), match="(?i)quantized"):
        torch.quantize_per_tensor(torch.ones(3).npu(), 0.1, 0, torch.qint8)
    with pytest.raises((NotImplementedError, RuntimeError), match="(?i)quantized"):
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8).to("npu")


@pytest.mark.parametrize("dtype", [torch.float16] if FIRST_GENERATION else [torch.float16, torch.bfloat16])
def test_half_precision_products_accumulate_in_float32(dtype):
    x, w = torch.randn(2, 8, 6, 6).to(dtype), torch.randn(4, 8, 3, 3).to(dtype)
    expected = F.conv2d(x.float(), w.float()).to(dtype)
    assert torch.equal(F.conv2d(x.npu(), w.npu()).cpu(), expected)
    a, b, c = torch.randn(5, 7).to(dtype), torch.randn(7, 3).to(dtype), torch.randn(5, 3).to(dtype)
    assert torch.equal((a.npu() @ b.npu()).cpu(), (a.float() @ b.float()).to(dtype))
    assert torch.equal(
        torch.addmm(c.npu(), a.npu(), b.npu()).cpu(), torch.addmm(c.float(), a.float(), b.float()).to(dtype)
    )


# ---- convolution and products of float32


def one_convolution(x):
    one = torch.ones(1, 1, 1, 1, device="npu")
    return F.conv2d(x.view(1, 1, 1, 1).npu(), one).item()


def one_product(x):
    return torch.mm(x.view(1, 1).npu(), torch.ones(1, 1, device="npu")).item()


@second_generation
def test_convolutions_round_their_inputs_until_told_not_to():
    assert torch.npu.conv.allow_hf32 is True and torch.npu.matmul.allow_hf32 is False
    assert kept_bits(one_convolution) == 11 and kept_bits(one_product) == 23
    torch.npu.conv.allow_hf32 = False
    torch.npu.matmul.allow_hf32 = True
    assert kept_bits(one_convolution) == 23 and kept_bits(one_product) == 11


@first_generation
def test_float32_is_multiplied_in_half_precision_until_told_not_to():
    torch.npu.conv.allow_hf32 = False
    assert kept_bits(one_convolution) == kept_bits(one_product) == 10
    torch.npu.set_option({"ACL_PRECISION_MODE": "must_keep_origin_dtype"})
    assert kept_bits(one_convolution) == kept_bits(one_product) == 23


@second_generation
def test_gradients_of_convolutions_round_too():
    torch.manual_seed(0)
    x, w = torch.randn(2, 3, 6, 6, device="npu"), torch.randn(4, 3, 3, 3, device="npu", requires_grad=True)

    def gradient():
        return torch.autograd.grad(F.conv2d(x, w).sum(), w)[0].cpu()

    rounded = gradient()
    torch.npu.conv.allow_hf32 = False
    difference = (rounded - gradient()).abs().max()
    assert 0 < difference < 1e-1


# ---- bfloat16


@second_generation
def test_bfloat16_works():
    assert torch.npu.is_bf16_supported() and torch.bfloat16 in torch.npu.get_amp_supported_dtype()
    assert torch.ones(2, device="npu", dtype=torch.bfloat16).sum() == 2


@first_generation
def test_bfloat16_is_refused():
    assert not torch.npu.is_bf16_supported()
    for make in (lambda: torch.ones(2, dtype=torch.bfloat16).npu(), lambda: torch.ones(2).npu().bfloat16()):
        with pytest.raises(RuntimeError, match="does not support bfloat16"):
            make()
    with pytest.warns(UserWarning, match="(?i)not supported"), torch.autocast("npu", dtype=torch.bfloat16):
        assert F.linear(torch.ones(1, 2).npu(), torch.ones(2, 2).npu()).dtype == torch.float32


# ---- overflow


def large():
    return torch.full((4,), 60000.0, dtype=torch.float16, device="npu")


OVERFLOWS = {
    "add": lambda: large() + large(),
    "in place": lambda: large().add_(large()),
    "out": lambda: torch.add(large(), large(), out=torch.empty(4, dtype=torch.float16, device="npu")),
    "foreach": lambda: torch._foreach_mul([large()], 2.0)[0],
    "cast": lambda: torch.full((4,), 1e6, device="npu").half(),
    "product": lambda: (large().view(4, 1) @ large().view(1, 4)).view(-1)[:4],
    "convolution": lambda: F.conv1d(large().view(1, 1, 4), large().view(1, 1, 4)[..., :1]).view(4),
    "view": lambda: torch.zeros(4, 2, dtype=torch.float16, device="npu")[:, 1].add_(large()).add_(large()),
}


@first_generation
@pytest.mark.parametrize("name", OVERFLOWS)
def test_overflow_saturates_and_sets_the_flag(name):
    assert not torch.npu.get_npu_overflow_flag()
    assert OVERFLOWS[name]().tolist() == [65504] * 4
    assert torch.npu.get_npu_overflow_flag() and torch.npu.utils.npu_check_overflow(1.0)
    assert not torch.npu.get_npu_overflow_flag()


@first_generation
def test_nan_becomes_zero_in_half_precision_only():
    zero = torch.zeros(3, dtype=torch.float16, device="npu")
    assert (zero / zero).tolist() == [0] * 3 and torch.npu.get_npu_overflow_flag()
    assert (zero.float() / zero.float()).isnan().all()


@first_generation
def test_ordinary_numbers_leave_the_flag_alone():
    F.conv2d(torch.randn(2, 3, 8, 8).half().npu(), torch.randn(4, 3, 3, 3).half().npu())
    assert not torch.npu.utils.is_support_inf_nan() and not torch.npu.get_npu_overflow_flag()


@second_generation
@pytest.mark.parametrize("name", OVERFLOWS)
def test_overflow_is_inf(name):
    result = OVERFLOWS[name]()
    assert result.isinf().all() and torch.npu.utils.is_support_inf_nan() and torch.npu.utils.npu_check_overflow(result)
    with pytest.raises(RuntimeError, match="npu_check_overflow"):
        torch.npu.get_npu_overflow_flag()


# ---- loss scaling


def scaled_step(scaler, factor):
    """One step of loss scaling of a single weight whose gradient is `factor`; gives whether it was taken."""
    weight = torch.ones(1, device="npu", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    loss = (weight.half() * factor).float().sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return weight.item() != 1


def test_the_scaler_of_torch_npu_skips_an_overflow():
    scaler = torch.npu.amp.GradScaler(init_scale=1024.0, growth_interval=2)
    taken = [scaled_step(scaler, factor) for factor in (1, 1, 60000, 1)]
    assert taken == [True, True, False, True] and scaler.get_scale() == 1024
    state = scaler.state_dict()
    assert state["dynamic"] is True
    scaler.load_state_dict(state)
    with pytest.raises(KeyError, match="dynamic"):
        scaler.load_state_dict(torch.amp.GradScaler("npu").state_dict())


@second_generation
def test_the_stock_scaler_skips_an_overflow():
    scaler = torch.amp.GradScaler("npu", init_scale=1024.0)
    assert [scaled_step(scaler, factor) for factor in (1, 60000)] == [True, False] and scaler.get_scale() == 512


@first_generation
def test_the_stock_scaler_does_not_work_where_numbers_saturate():
    with pytest.raises(NotImplementedError, match="torch_npu.npu.amp.GradScaler"):
        scaled_step(torch.amp.GradScaler("npu", init_scale=1024.0), 1)


def test_fused_optimizer_with_the_scaler():
    net = torch.nn.Linear(3, 2).npu()
    optimizer = torch_npu.optim.NpuFusedSGD(net.parameters(), lr=0.1)
    scaler = torch.npu.amp.GradScaler(init_scale=8.0)
    before = net.weight.detach().clone()
    scaler.scale(net(torch.ones(1, 3).npu()).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(before - net.weight, torch.full((2, 3), 0.1, device="npu"))
