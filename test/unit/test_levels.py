"""What each level means on each device, and which options contradict it."""

import pytest
import torch

from image_classification import levels
from image_classification.config import PrecisionConfig
from image_classification.levels import LARGEST_SCALE, LEVELS, parse_loss_scale, resolve_level
from mmcls.utils.errors import RequestError

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DEVICES = ("cpu", "npu", "cuda")
HALF = {"cpu": BF16, "npu": F16, "cuda": F16}
# level: parameters, norms and compute, with None for the short type; autocast; masters; loss scale with float16
TABLE = {
    "O0": (F32, F32, F32, False, False, 1.0),
    "O1": (F32, F32, None, True, False, "dynamic"),
    "O2": (None, F32, None, False, True, "dynamic"),
    "O3": (None, None, None, False, False, 1.0),
}


@pytest.fixture(autouse=True)
def bfloat16_devices(monkeypatch):
    """Pretends devices that compute in bfloat16, whatever this machine has; the set can be changed."""
    devices = set(DEVICES)
    monkeypatch.setattr(levels, "supports_bfloat16", lambda device_type: device_type in devices)
    return devices


def level_of(name, device_type="cuda", **options):
    return resolve_level(PrecisionConfig(opt_level=name, **options), device_type)


def row(level):
    return (
        level.parameter_type,
        level.norm_type,
        level.compute_type,
        level.autocast,
        level.master_weights,
        level.loss_scale,
    )


def row_with(name, half):
    *types, autocast, masters, scale = TABLE[name]
    return (*(dtype or half for dtype in types), autocast, masters, scale if half == F16 else 1.0)


def refused(name, device_type="cuda", **options):
    with pytest.raises(RequestError) as caught:
        level_of(name, device_type, **options)
    assert caught.value.remedy
    return caught.value


def test_the_table_has_four_levels():
    assert LEVELS.keys() == TABLE.keys()


@pytest.mark.parametrize("device_type", DEVICES)
@pytest.mark.parametrize("name", TABLE)
def test_the_table(name, device_type, bfloat16_devices):
    bfloat16_devices.discard("npu")  # the default there is float16, so bfloat16 is not needed
    level = level_of(name, device_type)
    assert level.name == name
    assert row(level) == row_with(name, HALF[device_type])


@pytest.mark.parametrize("device_type", DEVICES)
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["O1", "O2", "O3"])
def test_the_short_type_that_was_asked_for(name, half, device_type):
    assert row(level_of(name, device_type, half_type=half)) == row_with(name, getattr(torch, half))


@pytest.mark.parametrize(
    ("name", "options", "changed"),
    [
        ("O2", {"keep_batchnorm_fp32": False}, {"norm_type": F16}),
        ("O2", {"keep_batchnorm_fp32": True}, {}),
        ("O2", {"master_weights": True}, {}),
        ("O2", {"master_weights": False, "loss_scale": "1"}, {"master_weights": False, "loss_scale": 1.0}),
        ("O3", {"keep_batchnorm_fp32": True}, {"norm_type": F32}),
        ("O3", {"master_weights": True}, {"master_weights": True}),
        ("O3", {"master_weights": True, "loss_scale": "dynamic"}, {"master_weights": True, "loss_scale": "dynamic"}),
        ("O3", {"master_weights": False}, {}),
        ("O2", {"loss_scale": "128"}, {"loss_scale": 128.0}),
        ("O2", {"loss_scale": "1"}, {"loss_scale": 1.0}),
        ("O1", {"loss_scale": "1024"}, {"loss_scale": 1024.0}),
        ("O1", {"loss_scale": "dynamic"}, {}),
        ("O3", {"loss_scale": "1.0"}, {}),
        ("O3", {"loss_scale": "64", "master_weights": True}, {"master_weights": True, "loss_scale": 64.0}),
        ("O0", {"loss_scale": "1"}, {}),
    ],
)
def test_options_change_their_own_column_of_the_row(name, options, changed):
    plain, level = level_of(name), level_of(name, **options)
    assert row(level) == row(type(plain)(**vars(plain) | changed))


def test_float16_without_masters_at_o2_needs_a_scale_of_one():
    with pytest.raises(RequestError, match="--master_weights=False: .*; add --loss_scale=1"):
        level_of("O2", master_weights=False)


def test_bfloat16_takes_a_loss_scale_of_one():
    assert level_of("O2", "cpu", loss_scale="1") == level_of("O2", "cpu")


@pytest.mark.parametrize(
    ("name", "device_type", "options", "subject", "rule"),
    [
        ("O0", "cuda", {"half_type": "float16"}, "--half_type=float16", "O0 computes in float32"),
        ("O0", "cpu", {"half_type": "bfloat16"}, "--half_type=bfloat16", "O0 computes in float32"),
        ("O0", "cuda", {"keep_batchnorm_fp32": True}, "--keep_batchnorm_fp32", "the weights of O0 are float32"),
        ("O1", "cuda", {"keep_batchnorm_fp32": False}, "--keep_batchnorm_fp32", "belongs to O2 and O3"),
        ("O0", "cuda", {"master_weights": False}, "--master_weights", "belongs to O2 and O3"),
        ("O1", "npu", {"master_weights": True}, "--master_weights", "the weights of O1 are float32"),
        ("O0", "cuda", {"loss_scale": "dynamic"}, "--loss_scale=dynamic", "needs no loss scale"),
        ("O0", "npu", {"loss_scale": "128"}, "--loss_scale=128", "needs no loss scale"),
        ("O1", "cpu", {"loss_scale": "dynamic"}, "--loss_scale=dynamic", "bfloat16 has the range of float32"),
        ("O2", "cuda", {"loss_scale": "2", "half_type": "bfloat16"}, "--loss_scale=2", "range of float32"),
        ("O3", "npu", {"loss_scale": "dynamic"}, "--loss_scale=dynamic", "cannot be unscaled without float32 weights"),
        ("O3", "cuda", {"loss_scale": "128"}, "--loss_scale=128", "cannot be unscaled without float32 weights"),
        ("O2", "cuda", {"loss_scale": "8", "master_weights": False}, "--loss_scale=8", "cannot be unscaled"),
    ],
)
def test_pairs_that_make_no_sense_are_refused_with_the_rule(name, device_type, options, subject, rule):
    error = refused(name, device_type, **options)
    assert error.subject == subject
    assert rule in error.problem


@pytest.mark.parametrize("name", ["O1", "O2", "O3"])
@pytest.mark.parametrize("device_type", ["npu", "cuda"])
def test_bfloat16_where_the_device_has_none(bfloat16_devices, name, device_type):
    bfloat16_devices.remove(device_type)
    error = refused(name, device_type, half_type="bfloat16")
    assert error.subject == "--half_type=bfloat16"
    assert error.problem == f"this {device_type} does not compute in it"
    assert error.remedy == "take --half_type=float16"
    assert level_of(name, device_type, half_type="float16").compute_type == F16


@pytest.mark.parametrize("text", ["0", "0.5", "-1", "nan", "inf", "16777217", "1e30", "many", "Dynamic", "1,0", ""])
def test_numbers_that_are_no_loss_scale(text):
    for name in LEVELS:  # also where no scale would be used
        assert refused(name, loss_scale=text).problem == "must be `dynamic` or from 1 to 16777216"


@pytest.mark.parametrize(
    ("text", "scale"), [("dynamic", "dynamic"), ("1", 1.0), ("128", 128.0), ("2e3", 2000.0), ("16777216", 2.0**24)]
)
def test_numbers_that_are_a_loss_scale(text, scale):
    assert parse_loss_scale(text) == scale
    assert LARGEST_SCALE == 2.0**24


@pytest.mark.parametrize(
    ("name", "options", "line"),
    [
        ("O0", {}, "O0: weights float32, norms float32, compute float32, loss scale 1"),
        ("O1", {}, "O1: weights float32, norms float32, compute float16, loss scale dynamic"),
        (
            "O2",
            {"loss_scale": "128"},
            "O2: weights float16, norms float32, compute float16, float32 master weights, loss scale 128",
        ),
        ("O3", {"half_type": "bfloat16"}, "O3: weights bfloat16, norms bfloat16, compute bfloat16, loss scale 1"),
    ],
)
def test_a_row_in_words(name, options, line):
    assert str(level_of(name, **options)) == line
