"""The backend `hccl`: gloo over loopback, with hccl's rules and manners."""

import os

import torch
from torch_npu._C._distributed_c10d import ProcessGroupHCCL, _wrap_gloo


def _wait_seconds() -> int:
    return int(os.environ.get("HCCL_EXEC_TIMEOUT") or 1836)


def _new_process_group(backend_options, pg_options):
    from torch._C._distributed_c10d import ProcessGroupGloo

    gloo_options = ProcessGroupGloo._Options()
    gloo_options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    gloo_options._threads = 2
    gloo_options._timeout = backend_options.timeout
    try:
        gloo = ProcessGroupGloo(
            backend_options.store, backend_options.group_rank, backend_options.group_size, gloo_options
        )
    except RuntimeError as error:
        raise RuntimeError(
            "EI0006: Getting socket times out. Reason: the remote rank did not initiate a socket connection "
            f"request in time (simulated): {error}"
        ) from error
    options = pg_options if isinstance(pg_options, ProcessGroupHCCL.Options) else ProcessGroupHCCL.Options()
    options.is_high_priority_stream = False
    options._timeout = backend_options.timeout
    options.global_ranks_in_group = backend_options.global_ranks_in_group
    options.group_id = backend_options.group_id
    return _wrap_gloo(gloo, options, _wait_seconds())


def register_hccl() -> None:
    """Makes `init_process_group("hccl")` known to torch.distributed."""
    if torch.distributed.is_available():
        torch.distributed.Backend.register_backend("hccl", _new_process_group, extended_api=True, devices=["npu"])
