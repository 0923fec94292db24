"""Which device and cards a run takes, and how many ranks: what a request leaves open, by what this machine has."""

import os
from dataclasses import replace

from image_classification.config import TrainConfig
from mmcls.utils.device import BACKENDS, auto_select_device, check_npu_mask, device_count, visible_cards_text
from mmcls.utils.distribution import npu_distributed_data_parallel, started_as_rank
from mmcls.utils.errors import RequestError
from mmcls.utils.hccl_environment import prepare_hccl_environment


def choose_devices(config: TrainConfig) -> tuple[TrainConfig, tuple[int, ...], int, list[str]]:
    """Resolves `--device=auto` and counts.

    Returns:
        The configuration with its device, the card of each rank of this machine (none on the CPU), the number of these
        ranks, and what the user should know, a line each.

    Raises:
        RequestError: the machine does not have what was asked for.
    """
    distributed, notes = config.distributed, []
    if started_as_rank():  # torchrun has decided how many there are
        started = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if distributed.nproc_per_node not in (None, started) or distributed.world_size > 1:
            raise RequestError(
                "--nproc_per_node and --world_size", f"torchrun has started {started} ranks here", "leave them out"
            )
        distributed = replace(distributed, nproc_per_node=started)
    if distributed.simulate_npu and distributed.device not in ("auto", "npu"):
        raise RequestError("--simulate_npu", f"does not fit --device={distributed.device}", "leave --device out")
    device_type = "npu" if distributed.simulate_npu else distributed.device
    if device_type == "auto":
        device_type = auto_select_device()
    if device_type == "npu":
        check_npu_mask()
    visible = device_count(device_type)
    if device_type == "cpu":
        if distributed.gpu is not None:
            raise RequestError(f"--gpu={distributed.gpu}", "there is no card here", "leave --gpu out to run on the CPU")
        if distributed.multiprocessing_distributed:
            raise RequestError(
                "--multiprocessing_distributed", "there is no card here", "give the ranks by --nproc_per_node"
            )
        cards, num_ranks = (), distributed.nproc_per_node or 1
        if distributed.device == "auto":
            notes.append(f"no accelerator: {num_ranks} rank{'s' * (num_ranks > 1)} on the CPU")
    elif visible == 0:
        raise RequestError(
            f"--device={device_type}", f"there are no cards: {visible_cards_text(device_type)}", "take --device=cpu"
        )
    else:
        cards = _choose_cards(distributed.gpu, distributed.nproc_per_node,
                              distributed.multiprocessing_distributed, device_type, visible)  # fmt: skip
        num_ranks = len(cards)
        if started_as_rank() and num_ranks != distributed.nproc_per_node:
            raise RequestError(
                f"--gpu={distributed.gpu}",
                f"{num_ranks} cards for the {distributed.nproc_per_node} ranks that torchrun started",
                "give as many",
            )
    if device_type == "npu" and num_ranks * distributed.world_size > 1:
        npu_distributed_data_parallel()
        notes += prepare_hccl_environment(choose_ports=not started_as_rank())
    return replace(config, distributed=replace(distributed, device=device_type)), cards, num_ranks, notes


def _choose_cards(
    gpu: str | None, nproc: int | None, all_cards: bool, device_type: str, visible: int
) -> tuple[int, ...]:
    if gpu is not None:
        ids = [part.strip() for part in gpu.split(",")]
        cards = tuple(int(part) for part in ids if part.isascii() and part.isdecimal())
        if len(set(cards)) < len(ids):
            raise RequestError(f"--gpu={gpu}", "is not a list of card numbers", "write --gpu=0 or --gpu=0,1,2")
        flag = f"--gpu={gpu}"
    else:
        cards = tuple(range(visible if all_cards else nproc or 1))
        flag = f"--nproc_per_node={nproc}"
    if len(cards) > visible or max(cards) >= visible:
        asked = f"{len(cards)} devices asked" if len(cards) > visible else f"card {max(cards)} asked"
        raise RequestError(
            flag, f"{asked}, {visible_cards_text(device_type)}", f"take --gpu with ids below {visible}, or --device=cpu"
        )
    return cards


def check_backend(config: TrainConfig) -> None:
    """Raises RequestError where the collective library does not fit the device."""
    device, backend = config.distributed.device, config.distributed.dist_backend
    fitting = BACKENDS[device]
    if backend not in (None, fitting) and not (device == "cuda" and backend == "gloo"):
        raise RequestError(f"--dist_backend={backend}", f"does not fit {device}", f"take {fitting} or leave it out")
