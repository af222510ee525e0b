#!/usr/bin/env bash
# Sets up .venv if need be, then runs the tests: ./scripts/test.sh [--fast | --slow | --faults] [pytest arguments].
# --fast leaves out what starts programs or takes long. --slow adds what takes minutes. --faults runs all that does harm
# to a run (docs/explanation/reliability.md), what takes minutes too. tests/README.md says what is in each, and how long
# it takes.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
pytest=(.venv/bin/python -m pytest)
# Three files at a time, in the order of tests/conftest.py: many tests wait. Not more: some hold processes to limits of
# seconds.
together=(-n 3 --dist loadfile --no-loadscope-reorder)
case "${1:-}" in
    --fast)
        shift
        exec "${pytest[@]}" -m "not slow and not thorough" "${together[@]}" "$@"
        ;;
    --slow)
        shift
        exec "${pytest[@]}" "${together[@]}" "$@"
        ;;
    --faults)
        shift
        exec "${pytest[@]}" tests/faults tests/cases "${together[@]}" "$@"
        ;;
esac
if [[ $# -gt 0 ]]; then
    exec "${pytest[@]}" -m "not slow" "$@"
fi
exec "${pytest[@]}" -m "not slow" "${together[@]}"
