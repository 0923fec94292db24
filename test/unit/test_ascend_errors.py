"""Error codes of CANN and HCCL in plain language."""

import pytest

from mmcls.utils.ascend_errors import BUSY, CONSEQUENCES, MEANINGS, error_codes, explain, is_busy

# As they stand in the documentation and in users' reports.
MESSAGES = {
    "EI0002": "[rank3] EI0002: The wait execution of the Notify register times out.",
    "EI0006": "EI0006: Getting socket times out. Reason: Remote Rank did not send the data in time.",
    "EJ0001": "[PID: 8] EJ0001: Failed to initialize the HCCP process.",
    "EJ0003": "EJ0003: Failed to bind the IP port.",
    "EZ9999": "EZ9999: Inner Error!",
    "ERR99999": "[ERROR] 2024-01-01 (PID:1, Device:0, RankID:-1) ERR99999 UNKNOWN applicaiton exception",
    "107020": "ACL stream synchronize failed, error code:107020",
    "207018": "NPU function error: aclrtMalloc, error code is 207018",
    "507018": "NPU error, error code is 507018(AI CPU exception)",
    "507046": "aclrtSynchronizeStream failed, error code:507046",
    "507054": "The error code is 507054",
}


@pytest.mark.parametrize(("code", "message"), MESSAGES.items())
def test_a_known_code_is_explained(code, message):
    line = explain(message)
    assert line.startswith(f"{code}: ")
    assert "; look first at " in line
    assert "\n" not in line


@pytest.mark.parametrize(
    "message", ["ValueError: 5070460", "tensor of 107002345 elements", "XEI0002", "no code at all", ""]
)
def test_other_text_is_left_alone(message):
    assert error_codes(message) == []
    assert explain(message) is None


def test_the_inner_code_tells_more_than_the_outer_one():
    text = "[ERROR] ERR00100 PTA call acl api failed\nerror code:507046\nEZ9999: Inner Error!"
    assert error_codes(text) == ["507046", "ERR00100", "EZ9999"]
    assert explain(text).startswith("507046: ")


def test_of_two_inner_codes_the_first_is_told():
    assert explain("EI0006: no socket\nEJ0003: port").startswith("EI0006: ")


def test_a_code_that_is_there_twice_is_one():
    assert error_codes("EI0002 then again EI0002") == ["EI0002"]


def test_groups_are_of_known_codes():
    assert BUSY | set(CONSEQUENCES) <= MEANINGS.keys()


@pytest.mark.parametrize(("code", "busy"), [("EJ0001", True), ("EJ0003", True), ("EI0019", True), ("EI0002", False)])
def test_only_what_another_job_holds_is_busy(code, busy):
    assert is_busy(f"RuntimeError: {code}: as CANN says it") is busy
