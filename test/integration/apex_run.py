"""Run with the simulated NPU and the double of Apex on its path, by itself or by torchrun: trains, says what it saw."""

import copy
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from apex import amp
from torch import Tensor, nn

from image_classification import worker
from image_classification.checkpoint import LAST
from image_classification.config import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    PrecisionConfig,
    RunConfig,
    RunPlan,
    TrainConfig,
    resolve,
)
from image_classification.optim import build_optimizer
from image_classification.resnet import build_resnet
from image_classification.training import Batch, TrainState, train_step
from mmcls.utils.device import saturates, set_device, use_full_float32
from mmcls.utils.distribution import destroy_process_group, get_rank, get_world_size, init_process_group

CONFIG = TrainConfig(
    model=ModelConfig(arch="resnet18", num_classes=10, stem="cifar", width_multiplier=0.125, zero_init_last_norm=True),
    data=DataConfig(data_path="synthetic", batch_size=8, image_size=8, workers=0),
    optim=OptimConfig(lr=0.02),
)


def build(
    device: torch.device,
    level: str,
    *,
    engine: str = "apex",
    optimizer: str = "sgd",
    resume: Path | None = None,
    **options,
) -> tuple[TrainState, TrainConfig, RunPlan]:
    """A run as the program builds it; options are those of PrecisionConfig. A process has one that uses Apex."""
    amp.reset()
    config = replace(
        CONFIG,
        optim=replace(CONFIG.optim, optimizer=optimizer),
        precision=PrecisionConfig(opt_level=level, amp_engine=engine, **options),
        run=RunConfig(resume=str(resume) if resume else None),
    )
    plan = resolve(config, get_world_size(), 1600, 16)
    state, _ = worker.build_state(config, plan, device)
    return state, config, plan


def batch(number: int, device: torch.device) -> Batch:
    generator = torch.Generator().manual_seed(number)
    images, labels = torch.randn(8, 3, 8, 8, generator=generator), torch.randint(10, (8,), generator=generator)
    return images.to(device), labels.to(device)


def weights_of(state: TrainState) -> dict[str, Tensor]:
    return {name: value.cpu().clone() for name, value in state.precision.weights().items()}


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest between two sets of weights."""
    return max((a[name].double() - b[name].double()).abs().max().item() for name in a.keys() | b.keys())


def train(state: TrainState, steps: int, micro_batches: int = 1, overflows: tuple[int, ...] = ()) -> list[dict]:
    """Trains; what was seen of each step. The backward passes numbered in `overflows` are too large for float16."""
    seen, passes, backward = [], iter(range(steps * micro_batches)), state.precision.backward
    state.precision.backward = lambda loss, last: backward(loss * (1e8 if next(passes) in overflows else 1.0), last)
    for _ in range(steps):
        before, scale = weights_of(state), state.precision.loss_scale
        first = state.step * micro_batches
        sums = train_step(state, [batch(first + number, state.device) for number in range(micro_batches)])
        parameters = dict(state.module.named_parameters())
        moved = difference(
            *({n: v for n, v in weights.items() if n in parameters} for weights in (before, weights_of(state)))
        )
        seen.append({"loss": sums.averages().loss, "moved": moved, "scale": state.precision.loss_scale,
                     "scale_factor": state.precision.loss_scale / scale, "skipped": state.precision.skipped_updates,
                     "in_a_row": state.precision.skips_in_a_row})  # fmt: skip
    state.precision.backward = backward
    return seen


def names_in_optimizer() -> list[str]:
    """The parameters in the order in which the optimizer has them."""
    module = plain_network()
    names = {parameter: name for name, parameter in module.named_parameters()}
    groups = build_optimizer(module, CONFIG.optim, 0.1).param_groups
    return [names[parameter] for group in groups for parameter in group["params"]]


def plain_network(weights: dict[str, Tensor] | None = None) -> nn.Module:
    """A network on the CPU, where Apex patches nothing."""
    module = build_resnet("resnet18", 10, stem="cifar", width_multiplier=0.125)
    if weights:
        module.load_state_dict(weights)
    return module


def train_ten_steps(device: torch.device, level: str) -> dict:
    state, _, _ = build(device, level)
    steps, weights = train(state, 10), weights_of(state)
    images, _ = batch(0, device)
    with torch.no_grad():
        logits = state.precision.infer(state.precision.weights(), images)
        expected = plain_network(weights).eval()(images.cpu())
    masters = dict(zip(names_in_optimizer(), amp.master_params(state.optimizer), strict=True))
    return {
        "steps": steps,
        "finite": all(bool(value.isfinite().all()) for value in weights.values()),
        "types": sorted({str(value.dtype) for value in weights.values()}),
        "from_masters": max((weights[n] - m.detach().cpu().float()).abs().max().item() for n, m in masters.items()),
        "from_own": max((weights[n] - p.detach().cpu()).abs().max().item() for n, p in state.module.named_parameters()),
        "logits": [str(logits.dtype), (logits.cpu() - expected).abs().max().item()],
        "fused": type(state.optimizer).__name__,
    }


def calls_of(device: torch.device, level: str, micro_batches: int, **options) -> list:
    """What Apex was asked for in two steps."""
    state, _, _ = build(device, level, **options)
    for step in range(2):
        train_step(state, [batch(step + number, device) for number in range(micro_batches)])
    return amp.calls.copy()


def overflow(device: torch.device, level: str) -> dict:
    found = {}
    for name, micro_batches, passes in (("alone", 1, (2,)), ("first of three", 3, (3,)), ("last of three", 3, (5,))):
        state, _, _ = build(device, level)
        state.precision.load_state_dict({"scale": 1024.0})
        found[name] = train(state, 4 if micro_batches == 1 else 3, micro_batches, passes)
    state, _, _ = build(device, level)
    state.precision.load_state_dict({"scale": 8.0})
    found["twenty"] = train(state, 21, overflows=tuple(range(20)))
    return found


def resume(device: torch.device, level: str, folder: Path) -> dict:
    """Five steps, a checkpoint, and five more in the same run, in a resumed one, and in one by torch's engine."""
    state, config, plan = build(device, level)
    if state.precision.scales_loss:
        state.precision.load_state_dict({"scale": 1024.0, "_growth_tracker": 7})
    train(state, 5, overflows=(1,) if state.precision.scales_loss else ())
    folder.mkdir()
    worker.checkpoint_writer(config, plan, tuple("0123456789"), folder)(state, False)
    saved, at_five = copy.deepcopy(state.precision.state_dict()), weights_of(state)
    straight, at_ten = train(state, 5), weights_of(state)

    resumed, _, _ = build(device, level, resume=folder / LAST)
    events = [name for name, _ in amp.calls]
    states = [saved, resumed.precision.state_dict()]
    found = {"events": events, "weights_at_5": difference(weights_of(resumed), at_five), "step": resumed.step}
    again = train(resumed, 5)
    found |= {"straight": straight, "again": again, "weights_at_10": difference(weights_of(resumed), at_ten)}

    by_torch, config, plan = build(device, level, engine="torch", resume=folder / LAST)
    states.append(by_torch.precision.state_dict())
    found["weights_by_torch"] = difference(weights_of(by_torch), at_five)
    found["by_torch"] = train(by_torch, 5)
    worker.checkpoint_writer(config, plan, tuple("0123456789"), folder)(by_torch, False)
    states.append(by_torch.precision.state_dict())
    back, _, _ = build(device, level, resume=folder / LAST)
    states.append(back.precision.state_dict())
    found["weights_back"] = difference(weights_of(back), weights_of(by_torch))
    found["states"] = [[s.get("scale"), s.get("_growth_tracker")] for s in states]
    return found


def clip(device: torch.device, level: str, optimizer: str) -> dict:
    """The norm of the gradients in float32 without Apex, and with it before and after the clipping to half of it."""
    state, _, _ = build(device, level, optimizer=optimizer)
    state.precision.load_state_dict({"scale": 1024.0})
    (images, labels), plain = batch(0, device), plain_network(weights_of(state))
    F.cross_entropy(plain(images.cpu()), labels.cpu()).backward()
    true = nn.utils.get_total_norm([p.grad for p in plain.parameters()]).item()
    state.precision.backward(F.cross_entropy(state.precision.forward(state.model, images).float(), labels))
    state.precision.unscale()
    norms = []
    for _ in range(2):
        norms.append(nn.utils.get_total_norm([p.grad for p in amp.master_params(state.optimizer)]).item())
        state.precision.clip_gradients(true / 2)
    state.precision.step()
    return {"true": true, "norms": norms, "fused": ["clip", {"max_norm": true / 2}] in [list(c) for c in amp.calls]}


def static_scale(device: torch.device) -> dict:
    """Both engines with the same scale; then what Apex does not do with a static one."""
    found = {}
    for micro_batches, steps in ((1, 10), (3, 4)):
        for engine in ("apex", "torch"):
            state, _, _ = build(device, "O2", engine=engine, loss_scale="1024", half_type="float16")
            found[f"{engine} {micro_batches}"] = train(state, steps, micro_batches)
    state, _, _ = build(device, "O2", loss_scale="128")
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 128.0, "unskipped": 5000}})
    return found | {"state": state.precision.state_dict(), "skips_overflows": state.precision.skips_overflows}


def one_process(device: torch.device, folder: Path) -> dict:
    levels = ("O1", "O2") if saturates(device) else ("O1", "O2", "O3")
    scaled = [level for level in levels if level != "O3"]
    return {
        "calls": {f"{level} {number}": calls_of(device, level, number) for level in levels for number in (1, 3)},
        "static calls": calls_of(device, "O2", 3, loss_scale="128"),
        "ten": {level: train_ten_steps(device, level) for level in levels},
        "static": static_scale(device),
        "overflow": {level: overflow(device, level) for level in scaled},
        "resume": {level: resume(device, level, folder / level) for level in levels},
        "clip": {f"{level} {kind}": clip(device, level, kind) for level in scaled for kind in ("sgd", "lars")},
    }


def over_ranks(state: TrainState) -> float:
    """The largest difference of the parameters from those of any other rank; norm statistics are each rank's own."""
    weights = state.precision.weights()
    mine = torch.cat([weights[name].flatten() for name, _ in state.module.named_parameters()])
    gathered = [torch.empty_like(mine) for _ in range(get_world_size())]
    dist.all_gather(gathered, mine)
    return max((mine - other).abs().max().item() for other in gathered)


def against_one_rank(device: torch.device, optimizer: str, micro_batches: int) -> dict:
    """Three steps by two ranks, and by one that has the micro-batches of both."""
    ends, apart, shares = [], [], (micro_batches, 2 * micro_batches)
    for share in shares:
        worker.get_world_size = get_world_size if share == micro_batches else lambda: 1
        state, _, _ = build(device, "O2", optimizer=optimizer)
        state.precision.load_state_dict({"scale": 1024.0})
        state.module.eval()  # norms keep their statistics, so that images do not see each other
        start = weights_of(state)
        for step in range(3):
            everyone = [batch(step * shares[1] + number, device) for number in range(shares[1])]
            train_step(state, everyone if share == shares[1] else everyone[get_rank() :: 2])
        ends.append(weights_of(state))
        apart.append(over_ranks(state))
    worker.get_world_size = get_world_size
    return {"apart": max(apart), "from_one": difference(*ends), "moved": difference(start, ends[1])}


def two_ranks(device: torch.device) -> dict:
    wrap = worker.wrap_distributed_model
    worker.wrap_distributed_model = lambda *args, **options: (amp.calls.append(("wrap", {})), wrap(*args, **options))[1]
    state, _, _ = build(device, "O2")
    events, name = [name for name, _ in amp.calls], type(state.model).__name__
    state.precision.load_state_dict({"scale": 1024.0})
    apart = []
    for step in range(5):
        train_step(state, [batch(2 * step + get_rank(), device)])
        apart.append(over_ranks(state))
    return {
        "events": events,
        "wrapper": name,
        "combines": state.precision.combines_gradients,
        "apart": apart,
        "overflow": train(state, 3, overflows=(1,) if get_rank() == 1 else ()),
        "apart after overflow": over_ranks(state),
        "against one": {
            f"{kind} {number}": against_one_rank(device, kind, number) for kind in ("sgd", "lars") for number in (1, 3)
        },
    }


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    device = set_device("npu", int(os.environ.get("LOCAL_RANK", "0")))
    use_full_float32(device)
    init_process_group(device, None, 60)
    found = one_process(device, folder) if get_world_size() == 1 else two_ranks(device)
    (folder / f"rank{get_rank()}.json").write_text(json.dumps(found))
    destroy_process_group()


main(Path(sys.argv[1]))
