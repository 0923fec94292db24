"""Trains ResNet-50 and its family for image classification: `python3 pytorch_resnet50_apex.py --help`."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

# First on the path: the package registry has another `mmcls`. In the environment too, for ranks and loader workers.
ROOTS = [str(HERE / "DistributedResnet50"), str(HERE.parent)]
if sys.path[:2] != ROOTS:
    sys.path[:0] = ROOTS
    os.environ["PYTHONPATH"] = os.pathsep.join([*ROOTS, *filter(None, [os.environ.get("PYTHONPATH")])])

# torch would load torch_npu by itself and fail as a whole where that fails; mmcls/utils/device.py loads it instead.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

if __name__ == "__main__":
    try:
        from image_classification.launch import main
    except ModuleNotFoundError as error:
        remedy = "pip install -r requirements.txt, or let test/quickstart.sh set up an environment"
        print(f"error: {sys.executable}: has no package {error.name}; {remedy}", file=sys.stderr)
        sys.exit(2)
    sys.exit(main())
