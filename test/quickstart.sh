#!/usr/bin/env bash
# Sets up what is missing, then trains ResNet-50 on handwritten digits with eight ranks. Arguments go to the program.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
flags=(--data_path=digits)
set_up
exec bash "$test_folder/train_full_8p.sh" "${flags[@]}" "$@"
