"""hccl with the ranks of one job; every rank runs this file, and the checks in the same order."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import torch_npu
from torch_npu.simulator import read_counters

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SUM = WORLD_SIZE * (WORLD_SIZE + 1) / 2  # of rank + 1


@pytest.fixture(scope="module", autouse=True)
def group():
    torch.npu.set_device(RANK)
    options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
    options.hccl_config = {"hccl_buffer_size": 200, "group_name": "all"}
    dist.init_process_group("hccl", pg_options=options)
    yield
    dist.barrier()
    dist.destroy_process_group()


def mine(*size, dtype=torch.float32):
    return torch.full(size, RANK + 1, dtype=dtype, device="npu")


def test_the_group_knows_its_options():
    group = dist.distributed_c10d._get_default_group()._get_backend(torch.device("npu"))
    assert dist.get_backend() == "hccl" and isinstance(group, torch_npu._C._distributed_c10d.ProcessGroupHCCL)
    assert group.options.hccl_config["hccl_buffer_size"] == 200


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8]
)
def test_all_reduce(dtype):
    if dtype == torch.bfloat16 and not torch.npu.is_bf16_supported():
        pytest.skip("this chip has no bfloat16")
    x = mine(3, dtype=dtype)
    dist.all_reduce(x)
    assert x.tolist() == [SUM] * 3
    x = mine(3, dtype=dtype)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    assert x.tolist() == [WORLD_SIZE] * 3


def test_all_reduce_of_booleans():
    x = torch.tensor([RANK == 0, False], device="npu")
    dist.all_reduce(x, dist.ReduceOp.MAX)
    assert x.tolist() == [True, False]


def test_average():
    x = mine(3)
    dist.all_reduce(x, dist.ReduceOp.AVG)
    assert x.tolist() == [SUM / WORLD_SIZE] * 3


def test_asynchronous_work_and_its_future():
    x = mine(3)
    work = dist.all_reduce(x, async_op=True)
    assert work.get_future().wait()[0].is_npu
    work.wait()
    assert work.is_completed() and x[0] == SUM


@pytest.mark.parametrize("dtype", [torch.float64, torch.uint16, torch.float8_e4m3fn])
def test_types_that_cannot_be_reduced(dtype):
    with pytest.raises(RuntimeError, match="hccl cannot reduce"):
        dist.all_reduce(torch.ones(2).to(dtype).to("npu"))


def test_what_else_hccl_refuses():
    with pytest.raises(RuntimeError, match="ERR02002"):
        dist.all_reduce(torch.ones(4, 4, device="npu")[:, 1:3])
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(1))
    with pytest.raises(RuntimeError, match="Cannot use this ReduceOp"):
        dist.all_reduce(mine(1, dtype=torch.int32), dist.ReduceOp.BOR)
    with pytest.raises(RuntimeError, match="hccl cannot reduce Byte"):
        dist.reduce_scatter_tensor(mine(1, dtype=torch.uint8), mine(WORLD_SIZE, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="any source"):
        dist.recv(mine(1))


def test_one_to_all_and_all_to_one():
    x = mine(2)
    dist.broadcast(x, WORLD_SIZE - 1)
    assert x[0] == WORLD_SIZE
    x = mine(2)
    dist.reduce(x, 0)
    assert RANK > 0 or x[0] == SUM
    gathered = [torch.zeros(2, device="npu") for _ in range(WORLD_SIZE)] if RANK == 0 else None
    dist.gather(mine(2), gathered, 0)
    assert RANK > 0 or [part[0].item() for part in gathered] == list(range(1, WORLD_SIZE + 1))
    part = torch.zeros(2, device="npu")
    dist.scatter(part, [torch.full((2,), float(i), device="npu") for i in range(WORLD_SIZE)] if RANK == 0 else None, 0)
    assert part[0] == RANK


def test_all_to_all():
    everyone = [float(rank + 1) for rank in range(WORLD_SIZE)]
    parts = [torch.zeros(1, device="npu") for _ in range(WORLD_SIZE)]
    dist.all_gather(parts, mine(1))
    assert [part.item() for part in parts] == everyone
    whole = torch.zeros(WORLD_SIZE, 2, device="npu")
    dist.all_gather_into_tensor(whole, mine(1, 2))
    assert whole[:, 1].tolist() == everyone
    part = torch.zeros(2, device="npu")
    dist.reduce_scatter_tensor(part, mine(2 * WORLD_SIZE))
    assert part.tolist() == [SUM] * 2
    dist.reduce_scatter(part, [mine(2) for _ in range(WORLD_SIZE)], dist.ReduceOp.AVG)
    assert part.tolist() == [SUM / WORLD_SIZE] * 2
    dist.all_to_all_single(whole[:, 0].clone(), mine(WORLD_SIZE))
    dist.all_to_all(parts, [mine(1) for _ in range(WORLD_SIZE)])
    assert [part.item() for part in parts] == everyone


def test_point_to_point():
    received = torch.zeros(2, device="npu")
    other = 1 - RANK
    pair = [dist.P2POp(dist.isend, mine(2), other), dist.P2POp(dist.irecv, received, other)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    assert received[0] == other + 1


def test_objects_and_barrier():
    everyone = [None] * WORLD_SIZE
    dist.all_gather_object(everyone, {"rank": RANK})
    assert everyone == [{"rank": rank} for rank in range(WORLD_SIZE)]
    message = [{"from": RANK}]
    dist.broadcast_object_list(message, 0)
    assert message == [{"from": 0}]
    dist.barrier(device_ids=[RANK])


def test_groups_beside_it():
    x = mine(1)
    dist.all_reduce(x, group=dist.new_group(list(range(WORLD_SIZE))))
    assert x == SUM
    x = torch.ones(1)
    dist.all_reduce(x, group=dist.new_group(backend="gloo"))
    assert x == WORLD_SIZE


def test_collectives_and_their_bytes_are_counted():
    start = read_counters()
    dist.all_reduce(mine(5))
    dist.broadcast(mine(3, dtype=torch.float16), 0)
    dist.barrier()
    spent = read_counters() - start
    assert (spent.collectives, spent.collective_bytes) == (3, 26)
    assert (spent.host_reads, spent.synchronizations) == (0, 0)


# ---- data parallel training


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(F.relu(self.norm(self.conv(x))).mean((2, 3)))


def train(wrapped, autocast=False, scaler=None):
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(RANK)
    for _ in range(3):
        images = torch.randn(4, 3, 8, 8, generator=generator).npu()
        with torch.autocast("npu", dtype=torch.float16, enabled=autocast):
            loss = F.cross_entropy(wrapped(images), torch.tensor([0, 1, 0, 1]).npu())
        optimizer.zero_grad()
        if scaler:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
    return loss


def assert_equal_on_all_ranks(module):
    for parameter in module.parameters():
        first = parameter.detach().clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, parameter)


@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"static_graph": True}]
)
def test_data_parallel_training(options):
    torch.manual_seed(RANK)  # the wrapper sends rank 0's parameters to all
    wrapped = nn.parallel.DistributedDataParallel(Net().npu(), device_ids=[RANK], **options)
    before = wrapped.module.head.weight.detach().clone()
    train(wrapped)
    assert_equal_on_all_ranks(wrapped)
    assert not torch.equal(before, wrapped.module.head.weight)


def test_data_parallel_training_in_channels_last():
    wrapped = nn.parallel.DistributedDataParallel(Net().npu().to(memory_format=torch.channels_last), device_ids=[RANK])
    train(wrapped)
    assert_equal_on_all_ranks(wrapped)


def test_two_ranks_equal_one_rank_on_both_batches():
    torch.npu.conv.allow_hf32 = False
    torch.manual_seed(0)
    alone = Net().npu().eval()  # frozen statistics
    together = nn.parallel.DistributedDataParallel(Net().npu().eval(), device_ids=[RANK])
    together.module.load_state_dict(alone.state_dict())
    images, labels = torch.randn(2 * WORLD_SIZE, 3, 8, 8).npu(), torch.arange(2 * WORLD_SIZE).npu() % 2
    F.cross_entropy(alone(images), labels).backward()
    part = slice(2 * RANK, 2 * RANK + 2)
    F.cross_entropy(together(images[part]), labels[part]).backward()
    torch.npu.conv.allow_hf32 = True
    for expected, actual in zip(alone.parameters(), together.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-6, atol=1e-6)


def test_synchronized_batch_norm():
    norm = nn.SyncBatchNorm(3).npu()
    torch.manual_seed(0)
    images = torch.randn(2 * WORLD_SIZE, 3, 4, 4)
    inputs = images[2 * RANK : 2 * RANK + 2].npu().requires_grad_()
    output = nn.parallel.DistributedDataParallel(norm, device_ids=[RANK])(inputs)
    whole = nn.BatchNorm2d(3)(images)
    torch.testing.assert_close(output.cpu(), whole[2 * RANK : 2 * RANK + 2])
    output.square().sum().backward()
    assert inputs.grad.isfinite().all()


def test_all_ranks_skip_an_overflow_of_one():
    weight = torch.ones(1, device="npu", requires_grad=True)
    scaler = torch.npu.amp.GradScaler(init_scale=4.0)
    loss = (weight.half() * (60000.0 if RANK == 0 else 1.0)).float().sum()
    scaler.scale(loss).backward()
    if torch.npu.utils.is_support_inf_nan():
        dist.all_reduce(weight.grad)  # as data parallel training does: it carries the inf
    scaler.step(torch.optim.SGD([weight], lr=1.0))
    scaler.update()
    assert weight.item() == 1 and scaler.get_scale() == 2


def test_mixed_precision_training():
    wrapped = nn.parallel.DistributedDataParallel(Net().npu(), device_ids=[RANK])
    train(wrapped, autocast=True, scaler=torch.npu.amp.GradScaler())
    assert_equal_on_all_ranks(wrapped)


def test_the_wrapper_of_mmcv():
    npu = pytest.importorskip("mmcv.device.npu")

    class Wrapper(npu.NPUDistributedDataParallel):
        def _run_ddp_forward(self, *inputs, **kwargs):  # mmcv 1.7 asks for an attribute that torch dropped
            inputs, kwargs = self.to_kwargs(inputs, kwargs, self.device_ids[0])
            return self.module(*inputs[0], **kwargs[0])

    wrapped = Wrapper(Net().npu(), device_ids=[RANK], broadcast_buffers=False)
    train(wrapped)
    assert_equal_on_all_ranks(wrapped)
