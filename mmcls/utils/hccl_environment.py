"""HCCL's environment variables: set where the user has not, checked where the user has, and told."""

import os
import random
import socket

from mmcls.utils.errors import RequestError

DEFAULTS = {"HCCL_CONNECT_TIMEOUT": "1200", "HCCL_EXEC_TIMEOUT": "1836", "HCCL_WHITELIST_DISABLE": "1"}
"""Seconds to set up links, seconds to wait inside a collective (CANN's own default), and no whitelist of addresses."""
# Smallest and largest value. HCCL_EXEC_TIMEOUT: 0 is `never` on A2 and A3; 17340 is the first generation's limit.
RANGES = {
    "HCCL_CONNECT_TIMEOUT": (120, 7200),
    "HCCL_EXEC_TIMEOUT": (0, 17340),
    "HCCL_WHITELIST_DISABLE": (0, 1),
    "HCCL_IF_BASE_PORT": (1024, 65520),
    "HCCL_BUFFSIZE": (1, 65536),
}
PORTS_OF_A_JOB = 32
PORT_NAMES = ("HCCL_IF_BASE_PORT", "HCCL_HOST_SOCKET_PORT_RANGE")


def prepare_hccl_environment(choose_ports: bool = True) -> list[str]:
    """Completes the environment that the ranks will inherit.

    Args:
        choose_ports: give the job ports of its own; only by who starts all ranks of the machine.

    Returns:
        Lines that say what is set.

    Raises:
        RequestError: a variable of the user has a value that HCCL does not take.
    """
    notes = []
    for name, (smallest, largest) in RANGES.items():
        value = os.environ.get(name)
        if value is None:
            continue
        if not value.isdecimal() or not smallest <= int(value) <= largest:
            raise RequestError(f"{name}={value}", f"must be from {smallest} to {largest}", "change it or unset it")
        notes.append(f"{name}={value}")
    for name, value in DEFAULTS.items():
        if name not in os.environ:
            os.environ[name] = value
            notes.append(f"{name}={value}")
    if choose_ports and not any(name in os.environ for name in PORT_NAMES):
        base = _free_block()
        os.environ["HCCL_IF_BASE_PORT"] = str(base)
        notes.append(f"HCCL_IF_BASE_PORT={base}, ports {base} to {base + PORTS_OF_A_JOB - 1} for this job")
    return notes


def _free_block() -> int:
    """The first of `PORTS_OF_A_JOB` free ports, so that two jobs share a machine."""
    for _ in range(100):
        base = random.SystemRandom().randrange(40000, 60000, PORTS_OF_A_JOB)
        if all(_is_free(port) for port in range(base, base + PORTS_OF_A_JOB)):
            return base
    raise RequestError("HCCL_IF_BASE_PORT", f"found no {PORTS_OF_A_JOB} free ports in a row", "set it yourself")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
