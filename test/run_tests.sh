#!/usr/bin/env bash
# Sets up what is missing, then runs every test. Arguments go to pytest.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
set_up
cd -- "$repository"
exec "$python" -m pytest "$@"
