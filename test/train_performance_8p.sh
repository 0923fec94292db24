#!/usr/bin/env bash
# Throughput run, mixed precision, eight ranks; --help lists the flags.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
exec "$python" "$program" --recipe=performance --nproc_per_node=8 "$@"
