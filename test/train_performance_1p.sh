#!/usr/bin/env bash
# Throughput run, mixed precision, one rank; --help lists the flags.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
exec "$python" "$program" --recipe=performance --nproc_per_node=1 "$@"
