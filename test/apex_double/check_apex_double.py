"""The double of Apex on a simulated NPU; NPU_SIMULATOR_SOC says which chip is played."""

import copy
import inspect

import apex
import pytest
import torch
import torch.nn.functional as F
import torch_npu
from apex import amp
from apex.optimizers import NpuFusedSGD
from torch import nn

F16, F32 = torch.float16, torch.float32
SATURATES = not torch_npu.npu.utils.is_support_inf_nan()
SIGNATURES = {
    amp.initialize: "(models, optimizers=None, enabled=True, opt_level='O1', cast_model_type=None, "
    "patch_torch_functions=None, keep_batchnorm_fp32=None, master_weights=None, loss_scale=None, "
    "cast_model_outputs=None, num_losses=1, verbosity=1, min_loss_scale=None, max_loss_scale=16777216.0, "
    "combine_grad=None, check_combined_tensors=None)",
    amp.scale_loss: "(loss, optimizers, loss_id=0, model=None, delay_unscale=False, delay_overflow_check=False)",
    amp.disable_casts: "()",
    amp.state_dict: "(destination=None)",
    amp.load_state_dict: "(state_dict)",
    amp.master_params: "(optimizer)",
}
CLASSES = {"sgd": torch.optim.SGD, "fused": NpuFusedSGD}


@pytest.fixture(autouse=True)
def fresh():
    amp.reset()
    torch.manual_seed(0)


def network():
    return nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))


def images(seed=0):
    return torch.randn(4, 3, 4, 4, generator=torch.Generator().manual_seed(seed)).npu()


def prepared(kind="sgd", momentum=0.9, **options):
    """A network and its optimizer after `amp.initialize`."""
    net = network().npu()
    optimizer = CLASSES[kind](net.parameters(), lr=0.05, momentum=momentum, weight_decay=1e-3)
    return amp.initialize(net, optimizer, **options, verbosity=0)


def backward(net, optimizer, factor=1.0, seed=0, **options):
    loss = F.cross_entropy(net(images(seed)).float(), torch.tensor([0, 1, 0, 1]).npu()) * factor
    with amp.scale_loss(loss, optimizer, **options) as scaled:
        scaled.backward()
    return loss.item()


def train_step(net, optimizer, factor=1.0, seed=0):
    optimizer.zero_grad()
    loss = backward(net, optimizer, factor, seed)
    optimizer.step()
    return loss


def names():
    return [name for name, _ in amp.calls]


def test_signatures():
    for function, signature in SIGNATURES.items():
        assert str(inspect.signature(function)) == signature, function.__name__
    settings = inspect.signature(NpuFusedSGD).parameters
    assert list(settings) == ["params", "lr", "momentum", "dampening", "weight_decay", "nesterov"]
    assert [setting.default for setting in settings.values()][2:] == [0, 0, 0, False]
    assert apex.__version__.endswith("+ascend") and apex.optimizers.NpuFusedSGD is NpuFusedSGD


@pytest.mark.parametrize(
    "options,message",
    [
        ({"opt_level": "O4"}, "Unexpected optimization level O4"),
        ({"opt_level": "O1", "keep_batchnorm_fp32": True}, "keep_batchnorm_fp32 should be None"),
        ({"opt_level": "O1", "keep_batchnorm_fp32": "False"}, "keep_batchnorm_fp32 should be None"),
        ({"opt_level": "O1", "master_weights": True}, "master_weights should be None"),
        ({"opt_level": "O1", "cast_model_type": F16}, "cast_model_type should remain float32"),
        ({"opt_level": "O2", "patch_torch_functions": True}, "patch_torch_functions=True"),
        ({"opt_level": "O0", "combine_grad": True}, "combine_grad=True"),
        ({"opt_level": "O3", "combine_grad": True}, "combine_grad=True"),
        ({"opt_level": "O3", "check_combined_tensors": True}, "check_combined_tensors=True"),
        ({"opt_level": "O2", "combine_grad": True, "master_weights": False}, "master_weights should be True"),
        ({"opt_level": "O2", "kind": "fused", "master_weights": False}, "master_weights should be True"),
        ({"opt_level": "O0", "kind": "fused"}, "fused optimizer"),
        ({"opt_level": "O3", "kind": "fused"}, "fused optimizer"),
    ],
    ids=str,
)
def test_options_that_are_refused(options, message):
    with pytest.raises(RuntimeError, match=message):
        prepared(**options)


def test_values_that_are_refused():
    with pytest.raises(AssertionError, match="keep_batchnorm_fp32 must be"):
        prepared(opt_level="O2", keep_batchnorm_fp32="yes")
    with pytest.raises(ValueError, match="could not convert"):
        prepared(opt_level="O2", loss_scale="high")


def test_models_that_are_refused():
    with pytest.raises(RuntimeError, match="0.weight with type torch.float32 on cpu"):
        amp.initialize(network())
    with pytest.raises(RuntimeError, match="0.weight with type torch.float16 on npu:0"):
        amp.initialize(network().npu().half())
    net = network().npu()
    net[1].running_mean.data = net[1].running_mean.half()
    with pytest.raises(RuntimeError, match="1.running_mean"):
        amp.initialize(net)
    with pytest.raises(RuntimeError, match="DataParallel"):
        amp.initialize(nn.DataParallel(nn.Identity()))


def test_the_order_of_calls_that_is_refused():
    with pytest.raises(RuntimeError, match="has not been initialized"):
        backward(network().npu(), None)
    net, optimizer = prepared(opt_level="O2")
    with pytest.raises(RuntimeError, match="only be called once"):
        amp.initialize(net, optimizer)
    backward(net, optimizer, delay_unscale=True)
    with pytest.raises(RuntimeError, match="must wait"):
        optimizer.step()
    assert names() == ["scale_loss", "initialize", "initialize", "scale_loss"]
    amp.reset()
    with pytest.raises(RuntimeError, match="passed through amp.initialize once"):
        amp.initialize(network().npu(), optimizer)


@pytest.mark.parametrize(
    "options,weights,norms,convolution,output",
    [
        ({"opt_level": "O0"}, F32, F32, F32, F32),
        ({"opt_level": "O1"}, F32, F32, F16, F16),
        ({"cast_model_outputs": F32}, F32, F32, F16, F32),
        ({"opt_level": "O2"}, F16, F32, F16, F32),
        ({"opt_level": "O2", "keep_batchnorm_fp32": "False"}, F16, F16, F16, F32),
        ({"opt_level": "O3"}, F16, F16, F16, F32),
        ({"opt_level": "O3", "keep_batchnorm_fp32": "True"}, F16, F32, F16, F32),
    ],
    ids=str,
)
def test_types(options, weights, norms, convolution, output):
    net, _ = prepared(**options)
    seen = []
    net[0].register_forward_hook(lambda module, args, result: seen.append(result.dtype))
    assert net(images()).dtype == output and seen == [convolution]
    assert (net[0].weight.dtype, net[1].weight.dtype, net[1].running_var.dtype) == (weights, norms, norms)
    assert {value.dtype for value in net.state_dict().values()} == {torch.float32, torch.int64}


def test_o1_patches_the_functions_of_everyone_but_where_that_is_disabled():
    prepared(opt_level="O1")
    other = network().npu()
    assert other(images()).dtype == torch.float16 and network()(images().cpu()).dtype == torch.float32
    with amp.disable_casts():
        assert other(images()).dtype == torch.float32
    assert other(images()).dtype == torch.float16
    amp.reset()
    assert other(images()).dtype == torch.float32
    prepared(opt_level="O2")
    with pytest.raises(AttributeError, match="handle"), amp.disable_casts():
        pass


def reference_losses(net, steps, scale):
    """A hand-written loop with master weights, on a network of half precision with float32 norms."""
    net.half()
    net[1].float()
    masters = [parameter.detach().float().requires_grad_() for parameter in net.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.05, momentum=0.9, weight_decay=1e-3)
    losses = []
    for seed in range(steps):
        loss = F.cross_entropy(net(images(seed).half()).float(), torch.tensor([0, 1, 0, 1]).npu())
        for parameter in net.parameters():
            parameter.grad = None
        (loss * scale).backward()
        for master, parameter in zip(masters, net.parameters(), strict=True):
            master.grad = parameter.grad.float() / scale
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, net.parameters(), strict=True):
                parameter.copy_(master)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("options", [{}, {"combine_grad": True}, {"kind": "fused"}], ids=str)
def test_o2_equals_a_loop_by_hand(options):
    net, optimizer = prepared(opt_level="O2", loss_scale="128.0", **options)
    losses = [train_step(net, optimizer, seed=seed) for seed in range(6)]
    torch.manual_seed(0)
    assert losses == pytest.approx(reference_losses(network().npu(), 6, 128.0), rel=1e-5)
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 128.0, "unskipped": 6}}
    state = optimizer.state_dict()["state"]
    assert [value["momentum_buffer"].dtype for value in state.values()] == [torch.float32] * 5


@pytest.mark.parametrize("options", [{}, {"combine_grad": True}, {"kind": "fused"}], ids=str)
def test_o1_equals_autocast_and_grad_scaler(options):
    net, optimizer = prepared(opt_level="O1", **options)
    losses = [train_step(net, optimizer, seed=seed) for seed in range(4)]
    torch.manual_seed(0)
    expected, net = [], network().npu()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    scaler = torch.npu.amp.GradScaler()
    for seed in range(4):
        optimizer.zero_grad()
        with torch.autocast("npu", torch.float16):
            logits = net(images(seed))
        loss = F.cross_entropy(logits.float(), torch.tensor([0, 1, 0, 1]).npu())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("kind", CLASSES)
def test_overflow_makes_one_step_do_nothing(level, kind):
    net, optimizer = prepared(kind, opt_level=level, min_loss_scale=20000.0)
    train_step(net, optimizer)
    before = copy.deepcopy(net.state_dict())
    masters = [parameter.clone() for parameter in amp.master_params(optimizer)]
    for scale in (32768.0, 20000.0):
        train_step(net, optimizer, factor=1e6)
        assert amp.calls[-1] == ("skipped", {"loss_scale": scale})
        assert amp.state_dict() == {"loss_scaler0": {"loss_scale": scale, "unskipped": 0}}
    for name in ("0.weight", "1.weight", "4.weight"):
        assert torch.equal(net.state_dict()[name], before[name])
    assert all(map(torch.equal, amp.master_params(optimizer), masters))
    train_step(net, optimizer)
    assert names()[-2:] == ["scale_loss", "step"]
    assert not torch.equal(net.state_dict()["4.weight"], before["4.weight"])


def test_the_scale_grows_after_2000_good_steps():
    net, optimizer = prepared(opt_level="O2", max_loss_scale=1024.0)
    for scale, expected in ((256.0, 512.0), (1024.0, 1024.0)):
        amp.load_state_dict({"loss_scaler0": {"loss_scale": scale, "unskipped": 1998}})
        train_step(net, optimizer)
        assert amp.state_dict() == {"loss_scaler0": {"loss_scale": scale, "unskipped": 1999}}
        train_step(net, optimizer)
        assert amp.state_dict() == {"loss_scaler0": {"loss_scale": expected, "unskipped": 0}}
    with pytest.raises(RuntimeError, match="Unexpected key"):
        amp.load_state_dict({"scale": 1.0})


@pytest.mark.parametrize("options", [{}, {"combine_grad": True}, {"kind": "fused"}], ids=str)
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("delay", [False, True])
def test_gradients_of_several_backward_passes_add_up(level, options, delay):
    net, optimizer = prepared(opt_level=level, loss_scale=64.0, **options)
    net.eval()
    single = []
    for seed in range(3):
        optimizer.zero_grad()
        backward(net, optimizer, seed=seed)
        single.append([parameter.grad.clone() for parameter in amp.master_params(optimizer)])
    optimizer.zero_grad()
    for seed in range(3):
        backward(net, optimizer, seed=seed, delay_unscale=delay and seed < 2)
    for parameter, *parts in zip(amp.master_params(optimizer), *single, strict=True):
        assert parameter.grad.dtype == torch.float32
        torch.testing.assert_close(parameter.grad, sum(parts), rtol=2e-3, atol=1e-4)  # half adds when delayed
    optimizer.step()


@pytest.mark.parametrize("factors", [(1e6, 1), (1, 1e6)])
def test_overflow_in_any_backward_pass_of_a_group_is_seen(factors):
    net, optimizer = prepared(opt_level="O2")
    optimizer.zero_grad()
    for factor in factors:
        backward(net, optimizer, factor)
    master = next(amp.master_params(optimizer))
    assert master.grad is not None
    optimizer.step()
    assert names()[-1] == "skipped" and master.grad is None


def test_a_chip_that_saturates_forgets_an_overflow_in_a_delayed_pass():
    net, optimizer = prepared(opt_level="O1")
    optimizer.zero_grad()
    backward(net, optimizer, factor=1e6, delay_unscale=True)
    backward(net, optimizer)
    optimizer.step()
    assert names()[-1] == ("step" if SATURATES else "skipped")


def test_a_static_scale_does_not_look_for_overflow():
    net, optimizer = prepared(opt_level="O2", loss_scale=65536)
    train_step(net, optimizer, factor=1e6)
    assert names()[-1] == "step"


def test_masters_are_made_of_the_half_weights_when_they_are_first_needed():
    net, optimizer = prepared(opt_level="O2")
    half, norm = net[0].weight, net[1].weight
    assert next(amp.master_params(optimizer)) is half
    optimizer.zero_grad()
    masters = list(amp.master_params(optimizer))
    assert masters[0].dtype == torch.float32 and torch.equal(masters[0], half.float()) and masters[1] is norm
    train_step(net, optimizer)
    assert torch.equal(half, masters[0].half()) and not torch.equal(half.float(), masters[0])
    assert torch.equal(net.state_dict()["0.weight"], half.float())


@pytest.mark.parametrize("first", ["load", "zero_grad"])
def test_momentum_is_rounded_to_half_unless_the_masters_are_there(first):
    net, optimizer = prepared(opt_level="O2")
    exact = torch.full_like(net[0].weight, 1 + 2**-20, dtype=torch.float32)
    saved = optimizer.state_dict() | {"state": {0: {"momentum_buffer": exact}}}
    if first == "zero_grad":
        optimizer.zero_grad()
    optimizer.load_state_dict(saved)
    optimizer.zero_grad()
    loaded = optimizer.state_dict()["state"][0]["momentum_buffer"]
    assert loaded.dtype == torch.float32 and torch.equal(loaded, exact) == (first == "zero_grad")


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_momentum_goes_between_sgd_and_the_fused_optimizer(level):
    net, optimizer = prepared(opt_level=level)
    train_step(net, optimizer)
    saved = copy.deepcopy((net.state_dict(), list(amp.master_params(optimizer)), optimizer.state_dict()))
    expected = [train_step(net, optimizer, seed=seed) for seed in range(3)]
    amp.reset()
    net, optimizer = prepared("fused", opt_level=level)
    train_step(net, optimizer, seed=5)  # has its buffers, and still takes what is loaded
    net.load_state_dict(saved[0])
    with torch.no_grad():
        for parameter, value in zip(amp.master_params(optimizer), saved[1], strict=True):
            parameter.copy_(value)
    optimizer.load_state_dict(saved[2])
    assert [train_step(net, optimizer, seed=seed) for seed in range(3)] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("options", [{"combine_grad": True}, {"kind": "fused"}], ids=str)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_combined_gradients_must_stay(level, options):
    net, optimizer = prepared(opt_level=level, **options)
    train_step(net, optimizer)
    with pytest.raises(TypeError):
        optimizer.zero_grad(set_to_none=True)
    for parameter in net.parameters():
        parameter.grad = None
    with pytest.raises(RuntimeError, match="Combined grad has been destroyed"):
        train_step(net, optimizer)


@pytest.mark.parametrize("options", [{"combine_grad": True}, {"kind": "fused"}], ids=str)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_clipping_scales_the_unscaled_gradients(level, options):
    net, optimizer = prepared(opt_level=level, loss_scale=64.0, **options)
    with pytest.raises(RuntimeError, match="after backward"):
        optimizer.clip_optimizer_grad_norm_fused(0.01)
    backward(net, optimizer)
    before = [parameter.grad.clone() for parameter in amp.master_params(optimizer)]
    norm = torch.nn.utils.get_total_norm(before).item()
    assert optimizer.clip_optimizer_grad_norm_fused(1e3).item() == pytest.approx(norm)
    assert all(map(torch.equal, before, (parameter.grad for parameter in amp.master_params(optimizer))))
    optimizer.clip_optimizer_grad_norm_fused(norm / 2)
    for parameter, gradient in zip(amp.master_params(optimizer), before, strict=True):
        torch.testing.assert_close(parameter.grad, gradient / 2)
    optimizer.step()
    assert not hasattr(optimizer, "clip_grad_norm_fused_")


def test_the_fused_optimizer_alone_is_refused():
    net = network().npu()
    optimizer = NpuFusedSGD(net.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="set_to_none"):
        optimizer.zero_grad(set_to_none=True)
    net(images()).sum().backward()
    with pytest.raises(RuntimeError, match="should be used with AMP"):
        optimizer.step()


def test_a_deep_copy_at_o2_computes_with_the_weights_of_the_original():
    net, _ = prepared(opt_level="O2")
    duplicate = copy.deepcopy(net).eval()
    with torch.no_grad():
        duplicate[4].bias.add_(100)
    assert duplicate(images()).max() < 50


def test_disabled():
    net, optimizer = prepared(enabled=False, opt_level="O2")
    assert net[0].weight.dtype == torch.float32
    train_step(net, optimizer)
    assert names() == ["initialize", "scale_loss"]
