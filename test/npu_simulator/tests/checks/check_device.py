"""The device: placement, memory, streams, random numbers, saving, autocast; what is the same on all chips."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_npu


def convolutional_net():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 4)
    )


def test_it_says_that_it_is_simulated():
    assert torch_npu.SIMULATED and "simulated" in torch_npu.__version__


def test_devices():
    assert torch.npu.is_available() and torch.npu.device_count() == 8
    assert torch.accelerator.current_accelerator().type == "npu" and torch.accelerator.device_count() == 8
    torch.npu.set_device("npu:3")
    assert torch.npu.current_device() == 3 and torch.zeros(2).npu().device == torch.device("npu", 3)
    with torch.npu.device(5):
        assert torch.zeros(1, device="npu").device.index == 5
    torch.npu.set_device(torch.device("npu", 0))
    assert torch.npu.current_device() == 0


def test_a_device_that_is_not_there():
    with pytest.raises(RuntimeError, match="Invalid NPU device id 9"):
        torch.zeros(2, device="npu:9")
    with pytest.raises(AssertionError, match="Invalid device id"):
        torch.npu.get_device_name(9)


@pytest.mark.parametrize(
    "mix",
    [
        lambda: torch.ones(2, device="npu") + torch.ones(2),
        lambda: torch.ones(2, device="npu:0") + torch.ones(2, device="npu:1"),
        lambda: F.linear(torch.ones(2, 3), torch.ones(4, 3, device="npu")),
        lambda: F.conv2d(torch.ones(1, 3, 8, 8, device="npu"), torch.ones(4, 3, 3, 3, device="npu:1")),
    ],
)
def test_tensors_of_two_devices_do_not_mix(mix):
    with pytest.raises(RuntimeError, match="same device"):
        mix()


def test_no_numpy_from_a_device():
    with pytest.raises(TypeError, match="npu"):
        torch.ones(2, device="npu").numpy()


def test_views_share_memory():
    x = torch.arange(12.0, device="npu").view(3, 4)
    y = x.t()[1]
    y.fill_(7)
    assert x[:, 1].tolist() == [7, 7, 7] and y.data_ptr() == x.data_ptr() + 4
    x.split(2, 1)[0].zero_()
    assert x[:, :2].sum() == 0
    torch.view_as_real(torch.zeros(2, dtype=torch.cfloat, device="npu")).add_(1)


def test_memory_that_is_resized_or_replaced():
    out = torch.empty(0, device="npu")
    torch.add(torch.ones(3, device="npu"), 1, out=out)
    assert out.tolist() == [2, 2, 2]
    out.resize_(100).fill_(1)
    assert out.sum() == 100
    out.set_(torch.ones(5, device="npu"))
    assert out.shape == (5,)
    out.data = torch.ones(7, device="npu")
    assert out.shape == (7,)


def test_copies():
    x = torch.randn(4, 6, device="npu:0")
    y = x.to("npu:5")
    assert y.device.index == 5 and y.data_ptr() != x.data_ptr() and torch.equal(y.cpu(), x.cpu())
    z = torch.zeros(6, 4)
    z.copy_(x.t())
    assert torch.equal(z, x.t().cpu())
    nhwc = torch.randn(2, 3, 4, 5).to("npu", memory_format=torch.channels_last)
    assert nhwc.is_contiguous(memory_format=torch.channels_last)
    conjugate = torch.randn(3, dtype=torch.cfloat, device="npu").conj()
    assert torch.equal(conjugate.clone().cpu(), conjugate.cpu())


def test_memory_statistics():
    before = torch.npu.memory_allocated(6)
    x = torch.zeros(1 << 20, device="npu:6")
    assert torch.npu.memory_allocated(6) - before == 4 << 20
    free, total = torch.npu.mem_get_info(6)
    assert total - free == before + (4 << 20)
    del x
    assert torch.npu.memory_allocated(6) == before and torch.npu.max_memory_allocated(6) >= before + (4 << 20)
    torch.npu.reset_peak_memory_stats(6)
    assert torch.npu.max_memory_allocated(6) == before


def test_a_training_step_leaves_no_memory_behind():
    net = nn.Conv2d(3, 8, 3).npu()
    x = torch.ones(2, 3, 8, 8).npu()
    net(x).sum().backward()
    held = torch.npu.memory_allocated()
    for _ in range(10):
        net.zero_grad()
        net(x).sum().backward()
    assert torch.npu.memory_allocated() == held


def test_exact_float32_training_equals_the_cpu_bit_for_bit():
    torch.npu.conv.allow_hf32 = False
    torch.manual_seed(0)
    on_cpu = convolutional_net()
    on_npu = copy.deepcopy(on_cpu).npu()
    x, y = torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 3])
    for net, device in ((on_cpu, "cpu"), (on_npu, "npu")):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(net(x.to(device)), y.to(device)).backward()
            optimizer.step()
    torch.npu.conv.allow_hf32 = True
    for expected, actual in zip(on_cpu.state_dict().values(), on_npu.state_dict().values(), strict=True):
        assert torch.equal(expected, actual.cpu())


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_optimizers(optimizer_class, options):
    torch.manual_seed(0)
    on_cpu = nn.Linear(4, 3)
    on_npu = copy.deepcopy(on_cpu).npu()
    for net, device, extra in ((on_cpu, "cpu", {}), (on_npu, "npu", options)):
        optimizer = optimizer_class(net.parameters(), lr=0.1, **extra)
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.ones(2, 4, device=device)).pow(2).sum().backward()
            optimizer.step()
    torch.testing.assert_close(on_npu.weight.cpu(), on_cpu.weight)


@pytest.mark.parametrize("momentum,nesterov", [(0.0, False), (0.9, False), (0.9, True)])
def test_the_fused_optimizer_equals_sgd(momentum, nesterov):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).npu()
    fused = copy.deepcopy(plain)
    settings = dict(lr=0.1, momentum=momentum, weight_decay=0.01, nesterov=nesterov)
    optimizers = (
        torch.optim.SGD(plain.parameters(), **settings),
        torch_npu.optim.NpuFusedSGD(fused.parameters(), **settings),
    )
    for _ in range(4):
        for net, optimizer in zip((plain, fused), optimizers, strict=True):
            net(torch.ones(2, 4, device="npu")).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad(*[False] if net is plain else [])
    for expected, actual in zip(plain.parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(actual, expected)
    with pytest.raises(ValueError, match="set_to_none"):
        optimizers[1].zero_grad(set_to_none=True)


def fused_and_plain(**settings):
    """The same network twice, of a convolution and a linear layer in groups of their own, with both optimizers."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(8, 2)).npu()
    fused = copy.deepcopy(plain)
    groups = [[{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": 0.05}] for net in (plain, fused)]
    settings = dict(lr=0.1, momentum=0.9, weight_decay=0.01) | settings
    return plain, torch.optim.SGD(groups[0], **settings), fused, torch_npu.optim.NpuFusedSGD(groups[1], **settings)


def step_with(net, optimizer):
    net(torch.ones(2, 3, 4, 4, device="npu")).pow(2).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("settings", [{}, {"nesterov": True}, {"dampening": 0.5}], ids=str)
def test_states_go_from_sgd_to_the_fused_optimizer_and_back(settings):
    plain, sgd, fused, fused_sgd = fused_and_plain(**settings)
    for _ in range(2):
        step_with(plain, sgd)
    fused.load_state_dict(plain.state_dict())
    fused_sgd.load_state_dict(copy.deepcopy(sgd.state_dict()))
    loaded = [state["momentum_buffer"].clone() for state in sgd.state_dict()["state"].values()]
    for net, optimizer in ((plain, sgd), (fused, fused_sgd)):
        for group in optimizer.param_groups:  # new objects since loading
            group["lr"] *= 0.5
        step_with(net, optimizer)
        step_with(net, optimizer)
    torch.testing.assert_close(fused.state_dict(), plain.state_dict())
    expected, actual = (optimizer.state_dict()["state"] for optimizer in (sgd, fused_sgd))
    assert list(actual) == [0, 1, 2, 3]
    for number, before in enumerate(loaded):
        assert actual[number]["momentum_buffer"].shape == before.shape
        assert not torch.equal(actual[number]["momentum_buffer"], before)
        torch.testing.assert_close(actual[number]["momentum_buffer"], expected[number]["momentum_buffer"])
    sgd.load_state_dict(copy.deepcopy(fused_sgd.state_dict()))
    step_with(plain, sgd)
    step_with(fused, fused_sgd)
    torch.testing.assert_close(fused.state_dict(), plain.state_dict())


def test_a_loaded_state_is_copied_into_the_fused_optimizer():
    _, _, net, optimizer = fused_and_plain()
    buffers = [torch.ones_like(parameter) for parameter in net.parameters()]
    state = optimizer.state_dict() | {"state": {n: {"momentum_buffer": buffer} for n, buffer in enumerate(buffers)}}
    optimizer.load_state_dict(state)
    step_with(net, optimizer)
    assert all(torch.equal(buffer, torch.ones_like(buffer)) for buffer in buffers)
    for buffer in buffers:
        buffer.fill_(1e6)
    optimizer.load_state_dict(state)  # too late: the combined buffer stays
    step_with(net, optimizer)
    assert max(parameter.abs().max() for parameter in net.parameters()) < 10


def test_streams_and_events():
    stream = torch.npu.Stream()
    assert torch.npu.current_stream() != stream
    with torch.npu.stream(stream):
        assert torch.npu.current_stream() == stream
    assert torch.npu.current_stream() == torch.npu.default_stream()
    start, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    start.record()
    torch.ones(300, 300, device="npu").mm(torch.ones(300, 300, device="npu"))
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) > 0
    stream.wait_event(start)
    stream.wait_stream(torch.npu.current_stream())
    assert stream.query() and start.query()
    torch.ones(3, device="npu").record_stream(stream)


def test_random_numbers_of_each_card():
    torch.manual_seed(7)
    host = torch.rand(3)
    first, second = torch.rand(3, device="npu:0"), torch.rand(3, device="npu:1")
    assert torch.equal(first.cpu(), second.cpu())
    state = torch.npu.get_rng_state(1)
    drawn = torch.rand(3, device="npu:1")
    torch.npu.set_rng_state(state, 1)
    assert torch.equal(drawn, torch.rand(3, device="npu:1"))
    torch.manual_seed(7)
    assert torch.equal(host, torch.rand(3)) and torch.equal(first, torch.rand(3, device="npu:0"))
    generator = torch.Generator("npu:1").manual_seed(5)
    drawn = torch.rand(4, device="npu:1", generator=generator)
    assert torch.equal(drawn, torch.rand(4, device="npu:1", generator=generator.manual_seed(5)))
    with pytest.raises(RuntimeError, match="Expected a 'npu' device type"):
        torch.rand(3, device="npu", generator=torch.Generator())


def test_dropout_draws_from_the_card():
    host = torch.get_rng_state()
    torch.npu.manual_seed_all(1)
    first = F.dropout(torch.ones(64, device="npu"))
    torch.npu.manual_seed_all(1)
    assert torch.equal(first, F.dropout(torch.ones(64, device="npu")))
    assert torch.equal(host, torch.get_rng_state())


def test_pinned_memory_and_loader():
    from torch.utils.data import DataLoader, TensorDataset

    assert torch.randn(5).pin_memory().is_pinned() and not torch.randn(5).is_pinned()
    data = TensorDataset(torch.randn(32, 3), torch.arange(32))
    batches = list(DataLoader(data, 8, num_workers=2, pin_memory=True))
    assert len(batches) == 4 and all(images.is_pinned() for images, _ in batches)


def test_no_device_in_a_forked_child():
    import os

    torch.zeros(1, device="npu")
    child = os.fork()
    if not child:
        try:
            torch.zeros(1, device="npu")
        except RuntimeError as error:
            os._exit(0 if "spawn" in str(error) else 2)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(
    "map_location,expected",
    [
        (None, "npu:2"),
        ("cpu", "cpu"),
        ("npu:6", "npu:6"),
        ({"npu:2": "npu:1"}, "npu:1"),
        (torch.device("npu", 4), "npu:4"),
    ],
)
def test_checkpoints_move_between_devices(map_location, expected):
    net = nn.Linear(3, 2).npu(2)
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    state = torch.load(file, map_location=map_location, weights_only=True)
    assert str(state["weight"].device) == expected and torch.equal(state["weight"].cpu(), net.weight.cpu())


def test_copies_of_modules():
    net = copy.deepcopy(nn.Linear(3, 2).npu(1))
    assert net.weight.device.index == 1 and net.weight.untyped_storage().is_npu
    assert nn.Linear(3, 2, device="meta").to_empty(device="npu").weight.is_npu


def test_autocast():
    net, x = convolutional_net().npu(), torch.randn(2, 3, 8, 8, device="npu")
    with torch.autocast("npu", dtype=torch.float16):
        assert net[0](x).dtype == net(x).dtype == torch.float16
        assert net(x).softmax(1).dtype == torch.float32 and net(x).sum().dtype == torch.float32
        assert F.cross_entropy(net(x), torch.tensor([0, 1]).npu()).dtype == torch.float32
        assert torch.cat([net(x), torch.ones(2, 4, device="npu")]).dtype == torch.float32
        assert torch.addcmul(x, x, x.half()).dtype == torch.float32
    with torch.npu.amp.autocast():
        assert net(x).dtype == torch.float16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert net(x).dtype == torch.float32
    net(x).sum().backward()
    assert net[0].weight.grad.dtype == torch.float32


def test_autocast_casts_as_it_does_on_cuda():
    """The rules are PyTorch's lists, so that an operator of each list is enough."""
    x = torch.rand(4, 4, device="npu")
    with torch.autocast("npu", dtype=torch.float16):
        assert x.mm(x).dtype == torch.float16
        assert x.half().exp().dtype == torch.float32 and x.half().norm().dtype == torch.float32
        assert x.half().cumsum(0).dtype == torch.float32
        assert x.half().cumsum(0, dtype=torch.float16).dtype == torch.float16
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            F.binary_cross_entropy(x, x)


def test_storage_formats_are_names_only():
    x = torch.randn(2, 3, 4, 5, device="npu")
    cast = torch_npu.npu_format_cast(x, 3)
    assert torch_npu.get_npu_format(x) == 0 and torch_npu.get_npu_format(cast) == 3 and torch.equal(cast, x)


def test_options():
    torch.npu.set_compile_mode(jit_compile=False)
    torch.npu.set_option({"ACL_OP_COMPILER_CACHE_MODE": "enable"})
    with pytest.raises(ValueError, match="ACL_PRECISION_MODE"):
        torch.npu.set_option({"ACL_PRECISION_MODE": "fast"})
    with pytest.raises(TypeError, match="must be a bool"):
        torch.npu.conv.allow_hf32 = 1
    torch.npu.config.allow_internal_format = False
    with pytest.raises(AttributeError):
        print(torch.npu.config.allow_internal_format)
