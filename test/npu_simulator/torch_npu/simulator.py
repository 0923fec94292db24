"""What tests read from the simulator; the real torch_npu has no such module."""

from dataclasses import asdict, dataclass

from torch_npu import _C


@dataclass(frozen=True)
class Counters:
    """What this process has asked of its NPUs since the last reset.

    Attributes:
        synchronizations: waits for a device, stream or event, and for the size of a result (`nonzero`).
        host_reads: values and tensors that went from a device to the host (`.item()`, `.cpu()`, printing).
        host_to_device_copies: tensors that went to a device.
        blocking_host_to_device_copies: those of them that stop the host: not pinned, or not `non_blocking`.
        kernels: operators that compute; views are not counted.
        collectives: collectives of hccl, barriers among them.
        collective_bytes: bytes of the tensors that this rank put into them.
    """

    synchronizations: int
    host_reads: int
    host_to_device_copies: int
    blocking_host_to_device_copies: int
    kernels: int
    collectives: int
    collective_bytes: int

    def __sub__(self, earlier: "Counters") -> "Counters":
        mine, theirs = asdict(self), asdict(earlier)
        return Counters(**{name: mine[name] - theirs[name] for name in mine})


def read_counters() -> Counters:
    """The counters as they stand; reading changes none of them."""
    return Counters(**_C.read_counters())


def reset_counters() -> None:
    """Sets every counter to zero. A fault that counts kernels or collectives starts again, too."""
    _C.reset_counters()
