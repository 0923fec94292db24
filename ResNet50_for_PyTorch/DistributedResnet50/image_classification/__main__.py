"""`python3 -m image_classification`, the same as pytorch_resnet50_apex.py."""

import os
import sys

# torch would load torch_npu by itself and fail as a whole where that fails; mmcls/utils/device.py loads it instead.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

if __name__ == "__main__":
    from image_classification.launch import main

    sys.exit(main())
