# Sourced by the commands beside it: sets `python` to an interpreter that headrace runs on, or says what to do.

runs() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; }

find_python() {
    if [[ -n ${HEADRACE_PYTHON:-} ]]; then
        python=$HEADRACE_PYTHON
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' && return
        echo "HEADRACE_PYTHON=$python does not run, or is older than Python 3.11." >&2
        exit 1
    fi
    for python in python3 python3.13 python3.12 python3.11; do
        runs "$python" && return
    done
    echo "headrace needs Python 3.11, 3.12 or 3.13, and no such python3 is on PATH ($(python3 --version 2>&1 || true))." >&2
    echo "Install one (Debian, Ubuntu: apt install python3 python3-venv), or name one: HEADRACE_PYTHON=/path/to/python." >&2
    exit 1
}
