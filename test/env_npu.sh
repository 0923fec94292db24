# shellcheck shell=bash
# Sourced: CANN's environment and the variables that ModelZoo's launchers set, where CANN is installed; nothing
# elsewhere. What the user has set stays.
_source_cann() { # a function, so that CANN's script does not see the caller's arguments
    local folder nounset=0
    if [[ -z ${ASCEND_OPP_PATH:-} ]]; then # else the user has sourced the CANN of their choice
        for folder in "${ASCEND_TOOLKIT_HOME:-}" "${ASCEND_TOOLKIT_HOME:+$ASCEND_TOOLKIT_HOME/..}" \
            "${ASCEND_HOME_PATH:-}" "${ASCEND_HOME_PATH:+$ASCEND_HOME_PATH/..}" \
            /usr/local/Ascend/{ascend-toolkit,cann} "${HOME:-}"/Ascend/{ascend-toolkit,cann}; do
            if [[ -n $folder && -f $folder/set_env.sh ]]; then break; fi
            folder=
        done
        if [[ -z $folder ]]; then return 0; fi
        if [[ $- == *u* ]]; then nounset=1; fi
        set +u # CANN's script reads variables that may be unset
        # shellcheck disable=SC1091
        source "$folder/set_env.sh" || echo "warning: $folder/set_env.sh failed with status $?" >&2
        if ((nounset)); then set -u; fi
    fi
    export HCCL_WHITELIST_DISABLE=${HCCL_WHITELIST_DISABLE-1}
    export HCCL_CONNECT_TIMEOUT=${HCCL_CONNECT_TIMEOUT-1200} # seconds; the default of 120 is short for eight slow starts
    export TASK_QUEUE_ENABLE=${TASK_QUEUE_ENABLE-1}
}
_source_cann
unset -f _source_cann
