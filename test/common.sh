# shellcheck shell=bash
# Sourced by the launchers: $test_folder, $repository, $program, the interpreter in $python, and `set_up`.
test_folder=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
repository=${test_folder%/*}
# shellcheck disable=SC2034  # the launchers use it
program=$repository/ResNet50_for_PyTorch/pytorch_resnet50_apex.py

source "$test_folder/env_npu.sh"

# The active virtual or conda environment, else the repository's .venv, else python3. conda's base environment
# is active on many machines without anybody having chosen it, so it comes after .venv.
python=python3
for environment in "${VIRTUAL_ENV:-}" "${CONDA_PREFIX:-}" "$repository/.venv"; do
    if [[ $environment == "${CONDA_PREFIX:-}" && ${CONDA_DEFAULT_ENV:-} == base ]]; then continue; fi
    if [[ -n $environment && -x $environment/bin/python ]]; then
        python=$environment/bin/python
        break
    fi
done

# Sets $python to an interpreter that has everything in requirements.txt, and makes its environment the active one.
set_up() {
    local candidate
    for candidate in "$python" python3 python3.{14,13,12,11,10}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            python=$("$candidate" "$test_folder/setup_environment.py")
            if [[ $python == "$repository/.venv/bin/python" ]]; then
                export VIRTUAL_ENV=$repository/.venv PATH=$repository/.venv/bin:$PATH
            fi
            return
        fi
    done
    local found
    found=$("$python" --version 2>&1) || found="not there"
    echo "error: $python: Python 3.10 or newer is needed, this is ${found#Python }; install it and start again" >&2
    exit 2
}
