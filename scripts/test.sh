#!/usr/bin/env bash
# Sets up .venv if need be, then runs the tests: ./scripts/test.sh [--fast | --slow | --faults] [pytest arguments].
# --fast leaves out what starts programs or takes long. --slow adds what takes minutes. --faults runs all that does harm
# to a run (docs/explanation/reliability.md), what takes minutes too.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
selection=(-m "not slow")
case "${1:-}" in
    --fast)
        shift
        exec .venv/bin/python -m pytest -m "not slow and not thorough" -n 2 --dist loadfile "$@"
        ;;
    --slow)
        shift
        selection=()
        ;;
    --faults)
        shift
        exec .venv/bin/python -m pytest tests/faults "$@"
        ;;
esac
pytest=(.venv/bin/python -m pytest "${selection[@]}")
if [[ $# -gt 0 ]]; then
    exec "${pytest[@]}" "$@"
fi
# Two files at a time; then, alone, those that hold processes to short time limits.
alone=(tests/distributed tests/faults/test_{hosts,links,lost_workers,membership,stops}.py)
"${pytest[@]}" -n 2 --dist loadfile "${alone[@]/#/--ignore=}"
exec "${pytest[@]}" "${alone[@]}"
