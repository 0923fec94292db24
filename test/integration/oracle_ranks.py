"""Run by torchrun: validates with several batch sizes, trains a little, and writes what rank 0 can see of all ranks."""

import json
import sys

import torch
import torch.distributed as dist

from image_classification.config import DataConfig, OptimConfig, PrecisionConfig
from image_classification.data import EvalLoader, TrainLoader, detect_layout, open_datasets
from image_classification.optim import build_optimizer
from image_classification.precision import make_precision
from image_classification.resnet import build_resnet
from image_classification.training import TrainState, train_step, validate
from mmcls.utils.distribution import average_norm_statistics, wrap_distributed_model

pictures, weights, output = sys.argv[1:]
dist.init_process_group("gloo")
rank, world_size, cpu = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
common = {"rank": rank, "world_size": world_size, "device": cpu, "memory_format": torch.contiguous_format}
config = DataConfig(data_path=pictures, workers=0)
data = open_datasets(detect_layout(pictures), config, 40)
module = build_resnet("resnet18", 3, stem="cifar", width_multiplier=0.125)
module.load_state_dict(torch.load(weights))
precision = make_precision(PrecisionConfig(), module, build_optimizer(module, OptimConfig(), 0.1), cpu)
state = TrainState(
    module=module,
    model=wrap_distributed_model(module, cpu),
    precision=precision,
    schedule=lambda step: 0.1,
    label_smoothing=0.0,
    seed=0,
    device=cpu,
)
results = {}
for batch_size in (1, 4, 7, 16):
    loader = EvalLoader(data.val, config, batch_size=batch_size, **common)
    metrics = validate(state, precision.weights(), loader, len(data.val))
    results[f"top1 at batch {batch_size}"] = metrics.top1_percent
    results[f"count at batch {batch_size}"] = metrics.count

batches = 24 // (2 * world_size)
loader = TrainLoader(data.train, config, micro_batch_size=2, micro_batches_per_epoch=batches, seed=0, **common)
module.train()
for batch in loader.epoch(0):
    train_step(state, [batch])


def largest_difference(tensors) -> float:
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    gathered = [torch.empty_like(flat) for _ in range(world_size)]
    dist.all_gather(gathered, flat)
    return max((flat - other).abs().max().item() for other in gathered)


buffers = [buffer for name, buffer in module.named_buffers() if "running" in name]
results["parameter difference"] = largest_difference(module.parameters())
results["norm difference before"] = largest_difference(buffers)
average_norm_statistics(module.state_dict())
results["norm difference"] = largest_difference(buffers)
if rank == 0:
    with open(output, "w") as file:
        json.dump(results, file)
dist.destroy_process_group()
