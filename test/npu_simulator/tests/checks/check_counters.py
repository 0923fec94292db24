"""What the counters see of a program; each check names the numbers that it expects."""

import pytest
import torch
from torch import nn

from torch_npu.simulator import read_counters


@pytest.fixture
def seen():
    """A function that gives what was counted since the check began, without the zeros."""
    torch.zeros(1, device="npu")
    start = read_counters()
    return lambda: {name: number for name, number in vars(read_counters() - start).items() if number}


def test_nothing_at_first(seen):
    assert seen() == {}


def test_kernels_but_not_views(seen):
    x = torch.ones(4, 4, device="npu")
    x.t().reshape(16)[2:].view(2, 7)
    assert seen() == {"kernels": 2}  # fill, and the copy that reshape needs
    (x + x).relu_()
    assert seen() == {"kernels": 4}


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: float(x.sum()),
        lambda x: bool(x.sum() > 0),
        lambda x: x.cpu(),
        lambda x: x.to("cpu", non_blocking=True),
        lambda x: x.tolist(),
        lambda x: torch.equal(x, x),
        lambda x: torch.zeros(3).copy_(x),
        lambda x: torch.save(x, "x.pt"),
    ],
)
def test_one_host_read(seen, read):
    x = torch.ones(3, device="npu")
    read(x)
    assert seen()["host_reads"] == 1


def test_printing_reads(seen):
    str(torch.ones(3, device="npu"))
    assert seen()["host_reads"] > 0


def test_a_step_that_stays_on_the_device_reads_nothing():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)).npu()
    images = torch.randn(2, 3, 8, 8).pin_memory().to("npu", non_blocking=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    start = read_counters()
    for _ in range(3):
        loss = nn.functional.cross_entropy(net(images), torch.zeros(2, dtype=torch.long, device="npu"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    spent = read_counters() - start
    assert spent.kernels > 50
    assert (spent.host_reads, spent.synchronizations, spent.host_to_device_copies) == (0, 0, 0)


def test_copies_to_the_device(seen):
    torch.ones(3).to("npu")
    torch.ones(3).to("npu", non_blocking=True)  # not pinned: it blocks all the same
    assert seen() == {"host_to_device_copies": 2, "blocking_host_to_device_copies": 2}
    torch.ones(6).pin_memory()[2:].to("npu", non_blocking=True)
    torch.ones(3).pin_memory().to("npu")
    assert seen() == {"host_to_device_copies": 4, "blocking_host_to_device_copies": 3}
    torch.tensor([1.0, 2.0], device="npu")[torch.tensor([0])]  # an index on the host is copied, too
    assert seen()["host_to_device_copies"] == 6


@pytest.mark.parametrize(
    "wait",
    [
        torch.npu.synchronize,
        lambda: torch.npu.synchronize(3),
        torch.accelerator.synchronize,
        lambda: torch.npu.current_stream().synchronize(),
        lambda: torch.npu.current_stream().record_event().synchronize(),
        lambda: torch.ones(3, device="npu").nonzero(),
    ],
)
def test_one_synchronization(seen, wait):
    wait()
    assert seen()["synchronizations"] == 1 and "host_reads" not in seen()
