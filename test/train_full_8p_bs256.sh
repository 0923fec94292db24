#!/usr/bin/env bash
# Accuracy run, float32, eight ranks, 256 images a rank and step; --help lists the flags.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
exec "$python" "$program" --recipe=full --nproc_per_node=8 --batch_size=256 "$@"
