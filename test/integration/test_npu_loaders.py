"""Batches on the simulated NPU, with and without a side stream: what npu_loaders.py saw."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

REPOSITORY = Path(__file__).resolve().parents[2]
PATHS = (REPOSITORY / "test" / "npu_simulator", REPOSITORY / "ResNet50_for_PyTorch" / "DistributedResnet50", REPOSITORY)
COPIES_AN_EPOCH = 5
"""Tables of draws and the order; none of them belongs to a step."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 4)):
        for name in ("ant", "bee"):
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 256, (20, 20, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{number}.png")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("npu_loaders.py")), str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, PATHS))},
        check=False, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_batches_equal_those_of_the_cpu_with_and_without_prefetching(seen):
    assert len(seen["results"]) == 8
    assert all(result["equal"] for result in seen["results"])
    assert seen["threads"] == []


def test_no_batch_makes_the_host_wait(seen):
    for result in seen["results"]:
        asked = result["asked"]
        assert asked["kernels"] > 0
        assert asked["synchronizations"] == asked["host_reads"] == 0, result
        assert asked["blocking_host_to_device_copies"] <= COPIES_AN_EPOCH, result
