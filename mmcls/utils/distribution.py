"""Process groups, the wrapper around the model, and the few collectives that a run needs; the only importer of mmcv."""

import inspect
import logging
import os
import sys
import warnings
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mmcls.utils.ascend_errors import CONSEQUENCES
from mmcls.utils.device import BACKENDS
from mmcls.utils.errors import RequestError

# torch 2.14 renamed the option.
_FORWARD_SYNC = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel.__init__).parameters
)
NORM_BUFFERS = ("running_mean", "running_var")

T = TypeVar("T")


def started_as_rank() -> bool:
    """Whether torchrun or our launcher started this process as a rank; schedulers set some of these, but not all."""
    return all(name in os.environ for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))


def init_process_group(device: torch.device, backend: str | None, timeout_seconds: float) -> None:
    """Joins the group that the environment names (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT); alone: no group."""
    if started_as_rank() and int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group(backend or BACKENDS[device.type], timeout=timedelta(seconds=timeout_seconds))


def destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def get_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def get_world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_communication_error(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone, so that this rank is not the cause."""
    text = str(error)
    gone = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", *CONSEQUENCES)
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and any(g in text for g in gone))


def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """Adds a tensor over all ranks, in place; the same bits on every rank."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def min_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """Takes the smallest of all ranks for each element, in place."""
    if dist.is_initialized():
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
    return tensor


def gather_over_ranks(value: T) -> list[T]:
    """Collects an object of each rank, in the order of the ranks, on every rank; it is pickled on its way."""
    if not dist.is_initialized():
        return [value]
    values: list = [None] * get_world_size()
    dist.all_gather_object(values, value)
    return values


def same_on_all_ranks(value: int, device: torch.device) -> bool:
    """Whether every rank has this whole number, by one MAX over (value, -value)."""
    if not dist.is_initialized():
        return True
    bounds = torch.tensor([value, -value], device=device)
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
    largest, smallest = bounds[0].item(), -bounds[1].item()
    return largest == smallest


def average_norm_statistics(tensors: dict[str, torch.Tensor]) -> None:
    """Sets the running statistics of batch norms among named tensors to their mean over the ranks.

    Each rank's norms see only its own images; before validating and saving, all ranks must hold the same ones.
    """
    if not dist.is_initialized():
        return
    buffers = [buffer for name, buffer in tensors.items() if name.rpartition(".")[2] in NORM_BUFFERS]
    if buffers:
        flat = torch.cat([buffer.flatten().float() for buffer in buffers])
        mean = sum_over_ranks(flat) / get_world_size()
        for buffer, values in zip(buffers, mean.split([buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(values.view_as(buffer))


def npu_distributed_data_parallel() -> type[DistributedDataParallel]:
    """`mmcv.device.npu.NPUDistributedDataParallel`, made to work on torch 2.

    mmcv 1.7.2 overrides `_run_ddp_forward` with code that reads an attribute torch removed in 2.1; torch's own method
    is put back. Inputs reach the module as they were passed, positional and by keyword.

    Raises:
        RequestError: mmcv is not there, or has no `device.npu` (only mmcv 1.x with at least 1.7 has it).
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # mmcv 1.x announces mmcv 2 at every import
            # and imports this module of torch, which tells of a CUDA compiler without a card
            logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
            from mmcv.device.npu import NPUDistributedDataParallel as MmcvWrapper
    except ImportError as error:
        module = sys.modules.get("mmcv")
        missing = module is None and error.name in ("mmcv", "mmcv.device")
        version = getattr(module, "__version__", None)
        found = "none" if missing else version or f"one that does not load ({error})"
        raise RequestError(
            "mmcv",
            f"needs mmcv 1.x for NPUDistributedDataParallel, found {found}",
            "run `python3 test/setup_environment.py --mmcv`",
        ) from error

    class NPUDistributedDataParallel(MmcvWrapper):
        _run_ddp_forward = DistributedDataParallel._run_ddp_forward

    return NPUDistributedDataParallel


def wrap_distributed_model(model: nn.Module, device: torch.device | str = "cuda", **options) -> nn.Module:
    """Wraps a model that is on its device so that backward averages the gradients over the ranks.

    Buffers are not sent from rank 0 at every step; `average_norm_statistics` makes them equal when that is needed.

    Args:
        model: the model, already on `device`.
        device: npu gives mmcv's NPUDistributedDataParallel, others torch's.
        **options: passed on to DistributedDataParallel.
    """
    device = torch.device(device)
    wrapper = npu_distributed_data_parallel() if device.type == "npu" else DistributedDataParallel
    index = None if device.type == "cpu" or device.index is None else [device.index]
    return wrapper(model, device_ids=index, **{_FORWARD_SYNC: False}, **options)


def wrap_non_distributed_model(model: nn.Module, device: torch.device | str = "cuda") -> nn.Module:
    """Puts the model on its device; one process drives one card, so there is nothing to wrap."""
    return model.to(device)
