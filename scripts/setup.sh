#!/usr/bin/env bash
# Make the Python environment of this project, or find that it is ready.
#
#   bash scripts/setup.sh
#
# An active environment (venv or conda) is used as it is; otherwise .venv in the repository is made and used.
# torch comes first, pinned, and from wherever your pip is told to look (PIP_INDEX_URL, PIP_FIND_LINKS, pip config), so
# that you get the CPU or CUDA build you want; a torch from 2.11 to 2.13 that is already there is kept.
# PYTHON=/path/to/python chooses the interpreter that .venv is made with.
#
# Other scripts source this file; `python`, `torchrun` and `pretrain` are then the environment's.
set -euo pipefail

TORCH_VERSION=2.13.0

setup_say() { echo "setup: $*" >&2; }

setup_die() {
    setup_say "$*"
    exit 1
}

# Whether a command is a Python that can run this project.
setup_is_python() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

# The interpreter to make .venv with: what PYTHON names, else the first one on PATH that is new enough.
setup_find_python() {
    local candidate
    if [[ -n ${PYTHON:-} ]]; then
        setup_is_python "$PYTHON" || setup_die "PYTHON=$PYTHON is not a Python 3.11 or newer."
        echo "$PYTHON"
        return
    fi
    for candidate in python3 python3.13 python3.12 python3.11 python; do
        if setup_is_python "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    setup_die "no Python 3.11 or newer on PATH. Install one, or name it: PYTHON=/path/to/python bash scripts/setup.sh"
}

# The folder of the environment to use; made if it is .venv and missing.
setup_find_environment() {
    local root=$1 environment python
    environment=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
    if [[ -n $environment ]]; then
        [[ -x $environment/bin/python ]] ||
            setup_die "the active environment $environment has no bin/python. Deactivate it, or make it again."
        setup_is_python "$environment/bin/python" ||
            setup_die "the active environment $environment has a Python older than 3.11. Deactivate it to use .venv."
        echo "$environment"
        return
    fi
    environment=$root/.venv
    if ! [[ -e $environment/bin/python || -L $environment/bin/python ]]; then
        python=$(setup_find_python) || exit 1
        setup_say "making $environment with $("$python" --version) ($python)"
        if ! "$python" -m venv "$environment" >&2; then
            rm -rf "$environment"
            setup_die "$python cannot make virtual environments; install its venv module (Debian: apt-get install" \
                "python3-venv), or activate an environment of your own."
        fi
    fi
    setup_is_python "$environment/bin/python" ||
        setup_die "the Python in $environment does not run, or is older than 3.11. Remove the folder and run this again."
    echo "$environment"
}

# One line that changes when the environment has to be looked at again: interpreter, what to install, what is installed.
setup_fingerprint() {
    "$1/bin/python" - "$2" <<'END'
import hashlib, sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

root = Path(sys.argv[1])
files = b"".join((root / name).read_bytes() for name in ("setup.py", "scripts/setup.sh"))
try:
    torch = version("torch")
except PackageNotFoundError:
    torch = "missing"
print(root, sys.executable, sys.version.split()[0], torch, hashlib.sha256(files).hexdigest())
END
}

setup_has_torch() {
    "$1/bin/python" - 2>/dev/null <<'END'
import sys
from importlib.metadata import version

sys.exit(not (2, 11) <= tuple(int(part) for part in version("torch").split(".")[:2]) <= (2, 13))
END
}

setup_install() {
    local python=$1/bin/python root=$2
    local hint="pip's own settings say where it looks: PIP_INDEX_URL, PIP_FIND_LINKS, 'pip config list'."
    "$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip >&2 ||
        setup_die "$python has no pip and cannot make one; install pip into the environment."
    if setup_has_torch "$1"; then
        setup_say "torch is there, kept"
    else
        setup_say "installing torch $TORCH_VERSION"
        "$python" -m pip install "torch==$TORCH_VERSION" >&2 ||
            setup_die "could not install torch $TORCH_VERSION (above). $hint"
    fi
    setup_say "installing pretraining and what it needs"
    "$python" -m pip install --editable "${root}[dev]" >&2 ||
        setup_die "could not install pretraining's requirements (above). $hint"
}

setup_main() {
    local root environment stamp
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
    environment=$(setup_find_environment "$root") || exit 1
    stamp=$environment/.pretraining-setup
    if [[ ! -f $stamp || $(setup_fingerprint "$environment" "$root") != "$(<"$stamp")" ]]; then
        # Jobs that start at the same time install once: those that waited for the lock find the work done.
        if command -v flock >/dev/null; then
            exec 9>"$environment/.pretraining-setup.lock"
            flock 9
        fi
        if [[ ! -f $stamp || $(setup_fingerprint "$environment" "$root") != "$(<"$stamp")" ]]; then
            setup_say "using $environment"
            setup_install "$environment" "$root"
            setup_fingerprint "$environment" "$root" >"$stamp"
        fi
        exec 9>&-
    fi
    setup_say "$environment is ready"
    export PATH="$environment/bin:$PATH"
}

setup_main
