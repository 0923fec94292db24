"""Run by torchrun, with the simulated NPU on its path: trains in several ways; each rank writes what it saw."""

import json
import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist
from mmcv.device.npu import NPUDistributedDataParallel
from torch import nn
from torch_npu.simulator import Counters, read_counters

from image_classification.config import (
    DataConfig,
    DistributedConfig,
    ModelConfig,
    OptimConfig,
    PrecisionConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
    resolve,
)
from image_classification.data import EvalLoader, TrainLoader, detect_layout, open_datasets
from image_classification.optim import build_optimizer
from image_classification.precision import make_precision
from image_classification.reporting import Reporter
from image_classification.resnet import build_resnet
from image_classification.training import TrainState, fit, fix_summation_order, train_step
from mmcls.utils.device import make_grad_scaler, set_device, use_full_float32
from mmcls.utils.distribution import (
    destroy_process_group,
    get_rank,
    get_world_size,
    init_process_group,
    wrap_distributed_model,
)

PRINT_FREQ, STEPS = 3, 6
CONFIG = TrainConfig(
    model=ModelConfig(arch="resnet18", num_classes=10, stem="cifar", width_multiplier=0.125),
    data=DataConfig(data_path="synthetic", batch_size=8, image_size=8, workers=0, synthetic_images=16 * STEPS),
    schedule=ScheduleConfig(epochs=2),
    distributed=DistributedConfig(device="npu"),
    # Images/s is counted from the first log line on: opening its window waits for the device.
    run=RunConfig(print_freq=PRINT_FREQ, throughput_warmup_steps=PRINT_FREQ),
)


O0, O1 = PrecisionConfig(), PrecisionConfig(opt_level="O1")


def make_state(device: torch.device, config: PrecisionConfig, wrapped: bool = True) -> TrainState:
    torch.manual_seed(0)
    module = build_resnet("resnet18", 10, stem="cifar", width_multiplier=0.125).to(device)
    precision = make_precision(config, module, build_optimizer(module, OptimConfig(), 0.05), device)
    return TrainState(
        module=module,
        model=wrap_distributed_model(module, device, gradient_as_bucket_view=True) if wrapped else module,
        precision=precision,
        schedule=lambda step: 0.05,
        label_smoothing=0.0,
        seed=0,
        device=device,
    )


def flat(tensors) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def difference_over_ranks(tensors) -> float:
    """The largest between this rank and any other."""
    mine = flat(tensors)
    gathered = [torch.empty_like(mine) for _ in range(get_world_size())]
    dist.all_gather(gathered, mine)
    return max((mine - other).abs().max().item() for other in gathered)


class Watch:
    """An observer that tells the reporter of rank 0, and notes the counters around each step.

    Attributes:
        steps: of each step but an epoch's first, what the training and the report of it asked of the device.
        differences: between the ranks' parameters after each epoch.
    """

    def __init__(self, reporter: Reporter | None):
        self._reporter, self._mark = reporter, None
        self.steps, self.differences = [], []

    def step_done(self, state: TrainState, sums, data_seconds: float) -> None:
        trained = read_counters()
        if self._reporter:
            self._reporter.step_done(state, sums, data_seconds)
        reported = read_counters()
        if self._mark:
            parts = {"training": trained - self._mark, "report": reported - trained}
            self.steps.append({"step": state.step} | {name: asdict(part) for name, part in parts.items()})
        self._mark = reported

    def training_paused(self) -> None:
        self._mark = None
        if self._reporter:
            self._reporter.training_paused()

    def epoch_done(self, state: TrainState, epoch: int, train, validation, ema) -> None:
        self.differences.append(difference_over_ranks(state.module.parameters()))
        if self._reporter:
            self._reporter.epoch_done(state, epoch, train, validation, ema)


def train_two_epochs(device: torch.device, config: PrecisionConfig, folder: Path) -> dict:
    """`fit` with everything that a run has; rank 0 reports."""
    state = make_state(device, config)
    data = open_datasets(replace(detect_layout("synthetic"), num_classes=10), CONFIG.data, 8)
    plan = resolve(CONFIG, get_world_size(), len(data.train), len(data.val))
    common = {"rank": get_rank(), "world_size": get_world_size(), "device": device,
              "memory_format": torch.contiguous_format}  # fmt: skip
    steps = plan.steps_per_epoch
    train = TrainLoader(data.train, CONFIG.data, micro_batch_size=8, micro_batches_per_epoch=steps, seed=0, **common)
    reporter = Reporter(CONFIG, plan, 10, device, time.time()) if get_rank() == 0 else None
    if reporter:
        reporter.open(folder / f"{config.opt_level} {config.half_type}", [], [])
        reporter.training_started(state)
    watch, before = Watch(reporter), flat(state.module.parameters())
    zeros = torch.zeros(8, 3, 8, 8, device=device)
    fix_summation_order(state, zeros, torch.zeros(8, dtype=torch.int64, device=device))
    val = EvalLoader(data.val, CONFIG.data, batch_size=8, **common)
    fit(state, train, val, plan, observer=watch, check_every=PRINT_FREQ)
    moved = (flat(state.module.parameters()) - before).abs().max().item()
    return {"steps": watch.steps, "differences": watch.differences, "moved": moved}


def compare_with_one_rank(device: torch.device) -> float:
    """Largest difference of the parameters from those of one rank that has both batches, after three steps."""
    both, alone = make_state(device, O0), make_state(device, O0, wrapped=False)
    for state in (both, alone):
        state.module.eval()  # norms keep their statistics, so that images do not see each other
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(16, 3, 8, 8, generator=generator).to(device)
        labels = torch.randint(10, (16,), generator=generator).to(device)
        mine = slice(8 * get_rank(), 8 * get_rank() + 8)
        train_step(both, [(images[mine], labels[mine])])
        train_step(alone, [(images, labels)])
    return (flat(both.module.parameters()) - flat(alone.module.parameters())).abs().max().item()


def overflow_on_one_rank(device: torch.device) -> list[dict]:
    """Three steps of O1; in the second, a gradient inside rank 1's backward pass is too large for float16."""
    state, seen = make_state(device, O1), []
    state.precision.load_state_dict({"scale": 1024.0})  # torch's first scale is too large for so small a network
    factor = 1.0
    # Not in the forward pass: torch_npu's scaler clears the card's flag after it, so overflows there are never seen.
    state.module.layer4.register_full_backward_pre_hook(lambda module, gradients: (gradients[0] * factor,))
    labels = torch.arange(8, device=device)
    for step in range(3):
        factor = 1e6 if step == 1 and get_rank() == 1 else 1.0
        before, scale = flat(state.module.parameters()), state.precision.loss_scale
        train_step(state, [(torch.randn(8, 3, 8, 8, device=device), labels)])
        after = flat(state.module.parameters())
        seen.append(
            {
                "updated": not torch.equal(before, after),
                "finite": bool(after.isfinite().all()),
                "scale_factor": state.precision.loss_scale / scale,
                "difference": difference_over_ranks([after]),
            }
        )
    return seen


def asked_by_a_bare_scaler(device: torch.device) -> Counters:
    """What the loss scaler asks of the device by itself, in one step of one parameter."""
    parameter = nn.Parameter(torch.ones(1, device=device))
    optimizer, scaler = torch.optim.SGD([parameter], lr=0.1), make_grad_scaler(device, 2.0**16, enabled=True)
    for _ in range(2):  # the first makes the scale on the device
        before = read_counters()
        scaler.scale(parameter.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return read_counters() - before


def move_scaler_states(device: torch.device) -> dict[str, float]:
    """Loads the state of either kind of scaler into O1, trains a step with it, and says which scale it has."""
    scalers = {
        "torch": torch.amp.GradScaler("npu", init_scale=1024.0),
        "torch_npu": torch.npu.amp.GradScaler(init_scale=512.0),
    }
    seen = {}
    for kind, scaler in scalers.items():
        scaler.scale(torch.ones((), device=device))
        state = make_state(device, O1, wrapped=False)
        state.precision.load_state_dict(scaler.state_dict())
        train_step(state, [(torch.randn(8, 3, 8, 8, device=device), torch.arange(8, device=device))])
        seen[kind] = state.precision.loss_scale
    return seen


def count_forwards() -> list:
    """Notes each call of the forward of mmcv's wrapper."""
    calls, forward = [], NPUDistributedDataParallel.forward

    def counted(self, *inputs, **options):
        calls.append(self)
        return forward(self, *inputs, **options)

    NPUDistributedDataParallel.forward = counted
    return calls


def main(folder: Path) -> None:
    device = set_device("npu", int(os.environ["LOCAL_RANK"]))
    use_full_float32(device)
    init_process_group(device, None, 60)
    forwards = count_forwards()
    results = {"O0": train_two_epochs(device, O0, folder), "forwards": len(forwards), "backend": dist.get_backend()}
    results |= {
        "O1": train_two_epochs(device, O1, folder),
        "O2": train_two_epochs(device, replace(O1, opt_level="O2"), folder),
        "difference from one rank": compare_with_one_rank(device),
        "overflow": overflow_on_one_rank(device),
        "torch_npu's scaler": isinstance(make_grad_scaler(device, 2.0**16, enabled=True), torch.npu.amp.GradScaler),
        "scaler alone": asdict(asked_by_a_bare_scaler(device)),
        "loaded scales": move_scaler_states(device),
    }
    if torch.npu.is_bf16_supported():
        results["bfloat16"] = train_two_epochs(device, replace(O1, half_type="bfloat16"), folder)
    (folder / f"rank{get_rank()}.json").write_text(json.dumps(results))
    destroy_process_group()


main(Path(sys.argv[1]))
