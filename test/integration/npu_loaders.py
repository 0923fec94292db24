"""Run with the simulated NPU on the path: batches on the device by every source; prints what they asked of it as JSON."""

import json
import sys
import threading
from dataclasses import asdict

import torch
from torch_npu.simulator import read_counters

from image_classification.config import DataConfig
from image_classification.data import TrainLoader, detect_layout, open_datasets
from mmcls.utils.device import set_device

SOURCES = {
    "read each time": {"resident": "off"},
    "on the device": {},
    "in main memory": {"resident": "host"},
    "with cutout": {"cutout": 4},
}


def epoch(dataset, device: torch.device, **options) -> tuple[list, dict]:
    """The second epoch's batches, on the CPU, and what the device was asked for in the meantime."""
    loader = TrainLoader(
        dataset,
        DataConfig(**{"workers": 0} | options),
        micro_batch_size=4,
        micro_batches_per_epoch=6,
        rank=0,
        world_size=1,
        seed=0,
        device=device,
        memory_format=torch.contiguous_format,
    )
    list(loader.epoch(0))
    before = read_counters()
    batches = list(loader.epoch(1))
    asked = asdict(read_counters() - before)
    loader.close()
    assert all(tensor.device == device for batch in batches for tensor in batch)
    return [[tensor.cpu() for tensor in batch] for batch in batches], asked


def main(pictures: str) -> None:
    device = set_device("npu", 1)
    dataset = open_datasets(detect_layout(pictures), DataConfig(), 24).train
    results = []
    for source, options in SOURCES.items():
        expected, _ = epoch(dataset, torch.device("cpu"), prefetch=0, **options)
        for prefetch in (0, 2):
            batches, asked = epoch(dataset, device, prefetch=prefetch, **options)
            equal = all(torch.equal(a, b) for pair in zip(expected, batches, strict=True) for a, b in zip(*pair))
            results.append({"source": source, "prefetch": prefetch, "equal": equal, "asked": asked})
    left = [thread.name for thread in threading.enumerate() if thread.name == "prefetch"]
    print(json.dumps({"results": results, "threads": left}))


if __name__ == "__main__":
    main(sys.argv[1])
