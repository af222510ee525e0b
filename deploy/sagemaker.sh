#!/bin/sh
# Entry point of a SageMaker training job: its hyperparameters, `--trainer.steps 2000`, become overrides of train.py.
set -eu
count=$#
while [ "$count" -gt 0 ]; do
    case $1 in
        --*=*) set -- "$@" "${1#--}" && shift && count=$((count - 1)) ;;
        --*) set -- "$@" "${1#--}=$2" && shift 2 && count=$((count - 2)) ;;
        *) echo "$1: must be --KEY VALUE, as SageMaker writes a hyperparameter" >&2 && exit 2 ;;
    esac
done
cd "$(dirname "$0")/.."
exec python train.py launch=sagemaker "$@"
