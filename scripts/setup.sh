# Sourced by train.sh and test.sh: makes .venv from the lock file where it is missing or stale.
# Needs Python 3.11 or later and nothing else. Another interpreter: PYTHON=/path/to/python.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: no Python of version 3.11 or later was found; install one, or type PYTHON=/path/to/python $0" >&2
    exit 1
}

# The lock file holds for Linux on x86-64; elsewhere pip resolves the ranges of pyproject.toml.
make_venv() {
    local python="$1" stamp="$2"
    local install=(.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile)
    echo "setting up .venv (once; a few minutes)" >&2
    rm -rf .venv
    "$python" -m venv .venv
    if [[ "$(uname -s)-$(uname -m)" == Linux-x86_64 ]]; then
        # pip unpacks on one core, and half of all bytes are libraries for GPUs: both halves at a time. The third call
        # finds them there, and would bring what only another version of Python needs.
        "${install[@]}" --no-deps -r <(grep '^nvidia' requirements.lock) &
        local gpu=$!
        "${install[@]}" --no-deps -r <(grep -v '^nvidia' requirements.lock)
        wait "$gpu"
        "${install[@]}" -r requirements.lock
        # The command `metalearn`, and the sweeper: Hydra finds a plugin only on the path. Setuptools is in the lock, so
        # nothing else is downloaded.
        "${install[@]}" --no-deps --no-build-isolation \
            --editable ./hydra_async_sweeper --editable .
    else
        "${install[@]}" --editable ./hydra_async_sweeper \
            --editable '.[dev,docs]'
    fi
    # pip would compile on one core only. Some packages bring files that this Python cannot compile: nobody imports them.
    .venv/bin/python -m compileall -q -j 0 .venv/lib >/dev/null 2>&1 || true
    echo "$stamp" >.venv/stamp
}

ensure_venv() {
    local python stamp
    python="$(find_python)"
    stamp="$("$python" -c 'import sys; print(sys.version)' | cat - requirements.lock pyproject.toml hydra_async_sweeper/pyproject.toml | cksum)"
    if [[ ! -f .venv/stamp || "$(cat .venv/stamp)" != "$stamp" ]]; then
        make_venv "$python" "$stamp"
    fi
}

# Two runs that start together must not build it twice.
if command -v flock >/dev/null; then
    exec 9>>.venv.lock
    held=0
    flock -n 9 || held=$?
    if [[ "$held" == 1 ]]; then # any other code: the file system has no locks
        echo "another setup holds $root/.venv.lock: waiting for its end" >&2
        flock -w 1800 9 || { echo "error: it is still held after 30 minutes; end that setup" >&2; exit 1; }
    fi
fi
ensure_venv
if command -v flock >/dev/null; then
    exec 9>&-
fi
