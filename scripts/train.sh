#!/usr/bin/env bash
# Sets up .venv if need be, then trains: ./scripts/train.sh [overrides]. Without overrides: MAML on drawn
# characters with two workers, about a minute.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
if [[ $# -eq 0 ]]; then
    set -- workers=2
fi
exec .venv/bin/python train.py "$@"
