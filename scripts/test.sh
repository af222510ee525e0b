#!/usr/bin/env bash
# Sets up .venv if need be, then runs the tests: ./scripts/test.sh [--slow] [pytest arguments].
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
selection=(-m "not slow")
if [[ "${1:-}" == --slow ]]; then
    selection=()
    shift
fi
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
pytest=(.venv/bin/python -m pytest "${selection[@]}")
if [[ $# -gt 0 ]]; then
    exec "${pytest[@]}" "$@"
fi
# Two files at a time; then, alone, those that hold processes to short time limits.
alone=(tests/distributed tests/test_faults.py)
"${pytest[@]}" -n 2 --dist loadfile "${alone[@]/#/--ignore=}"
exec "${pytest[@]}" "${alone[@]}"
