#!/usr/bin/env bash
# Make the Python environment of this project, or find that it is ready.
#
#   bash scripts/setup.sh           # what training needs
#   bash scripts/setup.sh dev       # and an extra of setup.py: here what tests need
#
# An active environment (venv or conda) is used as it is; otherwise .venv in the repository is made and used, with the
# Python of PYTHON=/path/to/python or the first one on PATH that fits.
# torch comes first, pinned, and from wherever your pip is told to look (PIP_INDEX_URL, PIP_FIND_LINKS, pip config), so
# that you get the CPU or CUDA build you want. A torch from 2.11 to 2.15 that is already there is kept, and in an active
# environment no torch is ever replaced.
# Other scripts source this file, with the extra or ""; `python` and `pretrain` are then the environment's.
set -euo pipefail

TORCH_VERSION=2.13.0

setup_say() { echo "setup: $*" >&2 || true; } # an unread stderr is no error

setup_die() {
    setup_say "$*"
    exit 1
}

# Whether a command is a Python that this project runs on.
setup_is_python() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; }

# Make .venv in the repository, unless it is there.
setup_make_venv() {
    local environment=$1 candidate python=""
    [[ ! -e $environment/bin/python && ! -L $environment/bin/python ]] || return 0
    local candidates=(python3 python3.13 python3.12 python3.11 python)
    [[ -z ${PYTHON:-} ]] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        ! setup_is_python "$candidate" || python=${python:-$candidate}
    done
    [[ -n $python ]] || setup_die "none of ${candidates[*]} is Python 3.11, 3.12 or 3.13. Install one, or name it:" \
        "PYTHON=/path/to/python bash scripts/setup.sh"
    if ! setup_stage "making $environment with $("$python" --version)" "$python" -m venv "$environment"; then
        rm -rf "$environment"
        setup_die "$python cannot make virtual environments; install its venv module (Debian: apt-get install" \
            "python3-venv), or activate an environment of your own."
    fi
}

# One line that changes when the environment has to be looked at again: version of torch; whether it is older or newer
# than those that are supported, kept or missing; what to install, with which interpreter, and what is installed.
setup_state() {
    "$1/bin/python" - "$2" <<'END'
import hashlib, sys
from importlib.metadata import distributions
from pathlib import Path

torch = next((each.version for each in distributions(name="torch")), "0.0")
release = [int(part) for part in torch.split(".")[:2]]
fit = "missing" if release == [0, 0] else "older" if release < [2, 11] else "newer" if release > [2, 15] else "kept"
files = b"".join(Path(sys.argv[1], name).read_bytes() for name in ("setup.py", "scripts/setup.sh"))
checkouts = [url.strip() for each in distributions(name="pretraining") if (url := each.read_text("direct_url.json"))]
print(torch, fit, sys.argv[1], sys.executable, sys.version.split()[0], hashlib.sha256(files).hexdigest(), *checkouts)
END
}

# Run a command as a stage, which is one line; its output goes to stderr.
setup_stage() {
    setup_say "$1 ..."
    "${@:2}" >&2
}

setup_install() {
    local environment=$1 root=$2 extra=$3 python=$1/bin/python version fit packages
    local pip=("$python" -m pip install --quiet --disable-pip-version-check --no-compile)
    local failed="(above). pip's settings say where it looks: PIP_INDEX_URL, PIP_FIND_LINKS, 'pip config list'."
    read -r version fit _ <<<"$(setup_state "$environment" "$root")"
    if [[ $fit == older || $fit == newer ]] && [[ -n ${VIRTUAL_ENV:-${CONDA_PREFIX:-}} ]]; then
        setup_die "the active environment $environment has torch $version, $fit than 2.11 to 2.15, which this project" \
            "runs on. Nothing was changed. Deactivate it, and .venv gets torch $TORCH_VERSION; or choose one in it" \
            "yourself: $python -m pip install torch==$TORCH_VERSION"
    fi
    "$python" -m pip --version >/dev/null 2>&1 || setup_stage "installing pip" "$python" -m ensurepip ||
        setup_die "$python has no pip and cannot make one; install pip into the environment."
    if [[ $fit == kept ]]; then
        setup_say "torch $version is there, and kept"
    else
        version=$TORCH_VERSION
        setup_stage "installing torch $version" "${pip[@]}" "torch==$version" ||
            setup_die "could not install torch $version $failed"
    fi
    setup_stage "installing pretraining from $root and what ${extra:-training} needs" \
        "${pip[@]}" --editable "$root${extra:+[$extra]}" "torch==$version" ||
        setup_die "could not install pretraining's requirements $failed"
    # The extra `fast` of setup.py: never built from source.
    setup_stage "installing fastokens, a faster BPE" "${pip[@]}" --only-binary=:all: "fastokens>=0.3.5,<0.4" ||
        setup_say "fastokens has no wheel here: 'pretrain prepare' encodes with the tokenizers library, which is slower"
    packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    # pip would compile with one process. A file for another Python is no error.
    setup_stage "compiling them" "$python" -m compileall -qq -j 0 "$packages" || true
}

setup_is_ready() { [[ $(cat "$3" 2>/dev/null) == "$(setup_state "$1" "$2")" ]]; }

setup_main() {
    local root environment stamp extra=$1
    [[ $extra =~ ^[a-z0-9,]*$ ]] || setup_die "'$extra' is no extra of setup.py. Call or source this with one, or with \"\"."
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
    environment=${VIRTUAL_ENV:-${CONDA_PREFIX:-$root/.venv}}
    [[ -n ${VIRTUAL_ENV:-${CONDA_PREFIX:-}} ]] || setup_make_venv "$environment"
    setup_is_python "$environment/bin/python" || setup_die "$environment has no Python 3.11, 3.12 or 3.13 that runs." \
        "Deactivate an active environment to use .venv; remove a .venv to make it again."
    stamp=$environment/.pretraining-setup${extra:+-$extra}
    if ! setup_is_ready "$environment" "$root" "$stamp"; then
        # Jobs that start at the same time install once: those that waited for the lock find the work done.
        exec 9>"$environment/.pretraining-setup.lock"
        ! command -v flock >/dev/null || flock 9
        if ! setup_is_ready "$environment" "$root" "$stamp"; then
            setup_install "$environment" "$root" "$extra"
            setup_state "$environment" "$root" >"$stamp"
            cp "$stamp" "$environment/.pretraining-setup" 2>/dev/null || true # the same file without an extra
        fi
        exec 9>&-
    fi
    setup_say "$environment is ready"
    export PATH="$environment/bin:$PATH"
}

setup_main "${1:-}"
