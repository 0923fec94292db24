#!/usr/bin/env bash
# Sets up what is missing, then trains ResNet-50 on handwritten digits with eight ranks on the CPU. Arguments go on.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
set_up
flags=(--data_path=digits --device=cpu)
if grep -qs avx512_bf16 /proc/cpuinfo; then
    flags+=(--opt_level=O1 --epochs=12)
else
    echo "no bfloat16 instructions: a quarter of ResNet-50's width, which takes three minutes instead of thirty" >&2
    flags+=(--width_multiplier=0.25)
fi
exec bash "$test_folder/train_full_8p.sh" "${flags[@]}" "$@"
