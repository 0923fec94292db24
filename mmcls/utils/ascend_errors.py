"""What the error codes of CANN and HCCL mean, in one line each, and what to look at first.

Sources: the troubleshooting guide of Ascend/pytorch and `NPUErrorCodes.h` there; the HCCL and aclError pages of the
CANN documentation. "Look first" for 107020 and the codes that begin with 5 is judgement.
"""

import re

MEANINGS = {
    "EI0001": ("an HCCL variable has a value out of range", "the HCCL_* variables in the first lines of the log"),
    "EI0002": (
        "a collective waited too long for another rank",
        "the rank that failed or stalled first; this one did not",
    ),
    "EI0006": (
        "the connection between ranks timed out",
        "ranks that did not start, HCCL_CONNECT_TIMEOUT, TLS switches",
    ),
    "EI0014": ("the rank table is wrong", "RANK_TABLE_FILE"),
    "EI0015": ("a rank cannot reach the root rank", "HCCL_SOCKET_IFNAME and port 60000"),
    "EJ0001": ("the card's communication service did not start", "an old job on this card: end it and wait 10 s"),
    "EJ0003": ("a port of HCCL is taken", "another job on this machine: HCCL_IF_BASE_PORT, HCCL_NPU_SOCKET_PORT_RANGE"),
    "EI0019": ("a port of HCCL is taken", "another job on this machine: HCCL_IF_BASE_PORT, HCCL_NPU_SOCKET_PORT_RANGE"),
    "EZ3002": ("the card has no such operator", "types and shapes of its inputs"),
    "EZ9999": ("an inner error of CANN", "the ops package of this chip, the inputs' types, the plog"),
    "107001": ("no such card", "--gpu and ASCEND_RT_VISIBLE_DEVICES"),
    "107002": ("no card was chosen in this thread", "set_device in threads of your own"),
    "107020": ("a task timed out", "a slow or hanging peer rank"),
    "207001": ("memory allocation failed", "--batch_size, other processes on the card"),
    "207018": (
        "the card is out of memory",
        "--batch_size, fragmentation (PYTORCH_NPU_ALLOC_CONF=expandable_segments:True)",
    ),
    "507010": ("the card's scheduler gave no sign of life", "the card's health (npu-smi info)"),
    "507011": ("a model failed on the card", "the plog"),
    "507014": ("an AI Core timed out", "run again with ASCEND_LAUNCH_BLOCKING=1"),
    "507015": ("an AI Core failed", "run again with ASCEND_LAUNCH_BLOCKING=1"),
    "507018": ("an AI CPU operator failed", "inputs and indices, labels out of range"),
    "507035": ("a vector core failed", "indices and alignment"),
    "507046": ("waiting for the card timed out", "a hanging operator, a dead card, a peer rank"),
    "507048": ("an inner task timed out", "peer ranks; it often comes with EI0002"),
    "507053": ("the card's memory has errors", "the hardware (npu-smi info -t ecc)"),
    "507054": ("the card's memory has errors that cannot be corrected", "the hardware (npu-smi info -t ecc)"),
    "507056": ("a link between cards failed", "the network"),
    "EE1001": ("no such card", "--gpu and ASCEND_RT_VISIBLE_DEVICES"),
    "ERR00100": ("a call of ACL failed", "the code inside the message, the plog"),
    "ERR01007": ("an operator is neither on the card nor on the CPU", "the list of supported operators"),
    "ERR99999": ("an error outside torch_npu", "the Python traceback"),
}
BUSY = {"EJ0001", "EJ0003", "EI0019"}
"""Codes that an old or another job causes, and that waiting may mend."""
CONSEQUENCES = ("EI0002", "107020", "507048")
"""Codes of a rank that waited for another one."""

# Wrappers name an outer code before the inner one that tells more.
_OUTER = ("ERR99999", "ERR00100", "EZ9999")


def error_codes(text: str) -> list[str]:
    """The known codes in a message, the most telling one first."""
    pattern = "|".join(rf"\b{code}\b" for code in MEANINGS)
    found = list(dict.fromkeys(re.findall(pattern, text)))
    return sorted(found, key=lambda code: code in _OUTER)


def explain(text: str) -> str | None:
    """One line of plain language for a message with a known code: `EI0002: ...; look first at ...`."""
    codes = error_codes(text)
    if not codes:
        return None
    meaning, look_first = MEANINGS[codes[0]]
    return f"{codes[0]}: {meaning}; look first at {look_first}"


def is_busy(text: str) -> bool:
    """Whether a message has a code that an old or another job causes, and that waiting may mend."""
    return not BUSY.isdisjoint(error_codes(text))
