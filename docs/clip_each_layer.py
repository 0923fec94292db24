"""A training step of one's own: clips the gradient of each layer apart, not of all together.

python3 docs/clip_each_layer.py --data_path=digits --width_multiplier=0.25 --max_steps=20
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "ResNet50_for_PyTorch" / "DistributedResnet50"), str(ROOT)]

from torch.nn.utils import clip_grad_norm_

from image_classification.launch import main
from image_classification.losses import cross_entropy
from image_classification.metrics import MetricSums
from image_classification.training import Batch, TrainState


def clipping_step(state: TrainState, group: list[Batch]) -> MetricSums:
    [(images, labels)] = group
    for parameters in state.optimizer.param_groups:
        parameters["lr"] = state.schedule(state.step)
    logits = state.precision.forward(state.model, images)
    loss = cross_entropy(logits, labels, state.label_smoothing)
    state.precision.backward(loss)
    state.precision.unscale()
    for weight in (weight for parameters in state.optimizer.param_groups for weight in parameters["params"]):
        clip_grad_norm_(weight, max_norm=0.1)
    state.precision.step()
    state.precision.zero_gradients()
    state.step += 1
    sums = MetricSums.zeros(state.device)
    sums.add(loss, logits, labels)
    return sums


if __name__ == "__main__":
    sys.exit(main(step_function=clipping_step))
