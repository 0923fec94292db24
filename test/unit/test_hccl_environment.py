"""HCCL's variables: completed, checked, told, and two jobs apart."""

import os
import socket

import pytest

from mmcls.utils import hccl_environment
from mmcls.utils.errors import RequestError
from mmcls.utils.hccl_environment import DEFAULTS, PORTS_OF_A_JOB, prepare_hccl_environment


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """No HCCL variable at first, and none left behind."""
    monkeypatch.setattr(os, "environ", {name: value for name, value in os.environ.items() if "HCCL" not in name})


def test_what_is_not_set_is_completed_and_told():
    notes = prepare_hccl_environment()
    base = int(os.environ["HCCL_IF_BASE_PORT"])
    assert notes == [
        *(f"{name}={value}" for name, value in DEFAULTS.items()),
        f"HCCL_IF_BASE_PORT={base}, ports {base} to {base + PORTS_OF_A_JOB - 1} for this job",
    ]
    assert os.environ.items() >= DEFAULTS.items()


def test_what_the_user_set_stays():
    os.environ |= {"HCCL_CONNECT_TIMEOUT": "300", "HCCL_IF_BASE_PORT": "50000"}
    notes = prepare_hccl_environment()
    assert (os.environ["HCCL_CONNECT_TIMEOUT"], os.environ["HCCL_IF_BASE_PORT"]) == ("300", "50000")
    assert {"HCCL_CONNECT_TIMEOUT=300", "HCCL_IF_BASE_PORT=50000"} <= set(notes)


def test_a_port_range_of_the_user_is_not_joined_by_a_port_of_ours():
    os.environ["HCCL_HOST_SOCKET_PORT_RANGE"] = "50000-50031"
    notes = prepare_hccl_environment()
    assert "HCCL_IF_BASE_PORT" not in os.environ
    assert len(notes) == len(DEFAULTS)


@pytest.mark.parametrize(
    "setting",
    ["HCCL_CONNECT_TIMEOUT=5", "HCCL_CONNECT_TIMEOUT=7201", "HCCL_CONNECT_TIMEOUT=", "HCCL_EXEC_TIMEOUT=2 hours",
     "HCCL_EXEC_TIMEOUT=-1", "HCCL_EXEC_TIMEOUT=1e3", "HCCL_WHITELIST_DISABLE=2", "HCCL_IF_BASE_PORT=80",
     "HCCL_IF_BASE_PORT=65521", "HCCL_BUFFSIZE=0", "HCCL_CONNECT_TIMEOUT=²00"],
)  # fmt: skip
def test_a_value_that_hccl_does_not_take_is_refused(setting):
    name, _, value = setting.partition("=")
    os.environ[name] = value
    with pytest.raises(RequestError) as caught:
        prepare_hccl_environment()
    assert caught.value.subject == setting
    assert "must be from" in caught.value.problem


@pytest.mark.parametrize("setting", ["HCCL_CONNECT_TIMEOUT=120", "HCCL_CONNECT_TIMEOUT=7200", "HCCL_EXEC_TIMEOUT=0"])
def test_the_ends_of_the_ranges_are_taken(setting):
    name, _, value = setting.partition("=")
    os.environ[name] = value
    assert setting in prepare_hccl_environment()


def test_blocks_of_ports_are_free_and_whole(monkeypatch):
    """With one port of the first block taken, the next one is chosen."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        first = taken.getsockname()[1] - 7
        offers = iter([first, first, first + 2 * PORTS_OF_A_JOB])

        class Offers:
            def randrange(self, *_):
                return next(offers)

        monkeypatch.setattr(hccl_environment.random, "SystemRandom", Offers)
        monkeypatch.setattr(hccl_environment, "_is_free", lambda port, free=hccl_environment._is_free: (
            free(port) if port == first + 7 else True))  # fmt: skip
        assert hccl_environment._free_block() == first + 2 * PORTS_OF_A_JOB


def test_no_free_block_is_the_users_to_solve(monkeypatch):
    monkeypatch.setattr(hccl_environment, "_is_free", lambda port: False)
    with pytest.raises(RequestError, match="set it yourself"):
        prepare_hccl_environment()


def test_two_jobs_get_different_ports():
    bases = set()
    for _ in range(20):
        os.environ.pop("HCCL_IF_BASE_PORT", None)
        prepare_hccl_environment()
        bases.add(int(os.environ["HCCL_IF_BASE_PORT"]))
    assert len(bases) > 10
    assert all(base % PORTS_OF_A_JOB == 0 for base in bases)
