"""Run as a script, on the CPU or with the simulated NPU on its path: trains at every level and says what it saw."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from image_classification.config import DataConfig, OptimConfig, PrecisionConfig
from image_classification.data import TrainLoader, detect_layout, open_datasets
from image_classification.optim import build_optimizer
from image_classification.precision import make_precision
from image_classification.resnet import build_resnet
from image_classification.training import TrainState, train_step
from mmcls.utils.device import set_device, supports_bfloat16, use_full_float32

STEPS, BATCH, SIZE = 30, 32, 8


def make_state(config: PrecisionConfig, device: torch.device) -> TrainState:
    torch.manual_seed(0)
    module = build_resnet("resnet18", 10, stem="cifar", width_multiplier=0.125, zero_init_last_norm=True).to(device)
    optimizer = build_optimizer(module, OptimConfig(), 0.1)
    precision = make_precision(config, module, optimizer, device)
    return TrainState(
        module=module,
        model=module,
        precision=precision,
        schedule=lambda step: 0.03 * min(1.0, (step + 1) / 5),
        label_smoothing=0.0,
        seed=0,
        device=device,
    )


def types_of(tensors) -> list[str]:
    return sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})


def train(config: PrecisionConfig, device: torch.device, loader: TrainLoader) -> dict:
    """Thirty steps on digits: the types that were there, the losses, and what is saved."""
    state, outputs = make_state(config, device), {}
    watched = {"convolution": state.module.layer1[0].conv1, "norm": state.module.layer1[0].bn1, "head": state.module.fc}
    for name, layer in watched.items():
        layer.register_forward_hook(lambda _layer, _inputs, output, name=name: outputs.update({name: output}))
    losses, loss_types, backward = [], set(), state.precision.backward

    def watched_backward(loss: torch.Tensor, last: bool) -> None:
        loss_types.add(loss.dtype)
        backward(loss, last)

    state.precision.backward = watched_backward
    for batch in loader.epoch(0):
        sums = train_step(state, [batch])
        losses.append(sums.averages().loss)
    norms = [layer for layer in state.module.modules() if isinstance(layer, nn.BatchNorm2d)]
    norm_parameters = {id(parameter) for layer in norms for parameter in layer.parameters()}
    own = list(state.module.parameters())
    stepped = [parameter for group in state.optimizer.param_groups for parameter in group["params"]]
    return {
        "parameters": types_of(parameter for parameter in own if id(parameter) not in norm_parameters),
        "norms": types_of(parameter for layer in norms for parameter in layer.parameters()),
        "statistics": types_of(layer.running_var for layer in norms),
        "stepped": types_of(stepped),
        "masters": sum(all(parameter is not mine for mine in own) for parameter in stepped),
        "momentum": types_of(entry["momentum_buffer"] for entry in state.optimizer.state.values()),
        "convolution": types_of([outputs["convolution"]]),
        "logits": types_of([outputs["head"]]),
        "loss": sorted(map(str, loss_types)),
        "saved": types_of(value for value in state.precision.weights().values() if value.is_floating_point()),
        "losses": losses,
        "skipped": state.precision.skipped_updates,
        "scale": state.precision.loss_scale,
    }


def main(device_type: str, path: Path) -> None:
    torch.set_num_threads(1)
    device = set_device(device_type, 0)
    use_full_float32(device)
    data = open_datasets(detect_layout("digits"), DataConfig(), SIZE).train
    loader = TrainLoader(data, DataConfig(workers=0), micro_batch_size=BATCH, micro_batches_per_epoch=STEPS, rank=0, world_size=1, seed=0,
                         device=device, memory_format=torch.contiguous_format)  # fmt: skip
    results = []
    for half in ("float16", "bfloat16") if supports_bfloat16(device_type) else ("float16",):
        for level in ("O1", "O2", "O3"):
            config = PrecisionConfig(opt_level=level, half_type=half)
            results.append({**asdict(config), **train(config, device, loader)})
    results.append({**asdict(PrecisionConfig()), **train(PrecisionConfig(), device, loader)})
    path.write_text(json.dumps(results))


main(sys.argv[1], Path(sys.argv[2]))
