#!/usr/bin/env bash
# Validates the checkpoint of --resume or --pretrained, eight ranks; --help lists the flags.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
exec "$python" "$program" --recipe=full --nproc_per_node=8 --evaluate "$@"
