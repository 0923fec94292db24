"""A training step of one's own: clips the gradient of each weight tensor apart, not of all together.

python3 docs/clip_each_layer.py --data_path=digits --width_multiplier=0.25 --max_steps=20
"""

import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "ResNet50_for_PyTorch" / "DistributedResnet50"), str(ROOT)]

from torch.nn.utils import clip_grad_norm_

from image_classification.launch import main
from image_classification.training import TrainState, train_step

MAX_NORM = 0.1


def clip_each_layer(state: TrainState) -> None:
    """Of a convolution or linear layer the weight is one tensor; float32 and without the loss scale at every level."""
    for group in state.optimizer.param_groups:
        for weight in group["params"]:
            clip_grad_norm_(weight, MAX_NORM)


# Any function with the arguments and the result of train_step can stand here.
clipping_step = partial(train_step, clip=clip_each_layer)

if __name__ == "__main__":
    sys.exit(main(step_function=clipping_step))
