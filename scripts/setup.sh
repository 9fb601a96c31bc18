#!/usr/bin/env bash
# Make the Python environment of this project, or find that it is ready.
#
#   bash scripts/setup.sh           # what training needs
#   bash scripts/setup.sh dev       # and an extra of setup.py: here what tests need
#
# An active environment (venv or conda) is used as it is; otherwise .venv in the repository is made and used.
# torch comes first, pinned, and from wherever your pip is told to look (PIP_INDEX_URL, PIP_FIND_LINKS, pip config), so
# that you get the CPU or CUDA build you want. A torch from 2.11 to 2.15 that is already there is kept, and in an active
# environment no torch is ever replaced.
# PYTHON=/path/to/python chooses the interpreter that .venv is made with.
#
# Other scripts source this file, with the extra or ""; `python`, `torchrun` and `pretrain` are then the environment's.
set -euo pipefail

TORCH_VERSION=2.13.0

setup_say() { echo "setup: $*" >&2 || true; } # that nobody reads it is no reason to end

setup_die() {
    setup_say "$*"
    exit 1
}

# Whether a command is a Python that this project runs on.
setup_is_python() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null
}

# The interpreter to make .venv with: what PYTHON names, else the first one on PATH that fits.
setup_find_python() {
    local candidate
    if [[ -n ${PYTHON:-} ]]; then
        setup_is_python "$PYTHON" || setup_die "PYTHON=$PYTHON is no Python 3.11, 3.12 or 3.13."
        echo "$PYTHON"
        return
    fi
    for candidate in python3 python3.13 python3.12 python3.11 python; do
        if setup_is_python "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    setup_die "no Python 3.11, 3.12 or 3.13 on PATH. Install one, or name it: PYTHON=/path/to/python bash scripts/setup.sh"
}

# The folder of the environment to use; made if it is .venv and missing.
setup_find_environment() {
    local root=$1 environment python
    environment=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
    if [[ -n $environment ]]; then
        [[ -x $environment/bin/python ]] ||
            setup_die "the active environment $environment has no bin/python. Deactivate it, or make it again."
        setup_is_python "$environment/bin/python" ||
            setup_die "the active environment $environment has another Python than 3.11, 3.12 or 3.13. Deactivate it to use .venv."
        echo "$environment"
        return
    fi
    environment=$root/.venv
    if ! [[ -e $environment/bin/python || -L $environment/bin/python ]]; then
        python=$(setup_find_python) || exit 1
        if ! setup_stage "making $environment with $("$python" --version)" "$python" -m venv "$environment"; then
            rm -rf "$environment"
            setup_die "$python cannot make virtual environments; install its venv module (Debian: apt-get install" \
                "python3-venv), or activate an environment of your own."
        fi
    fi
    setup_is_python "$environment/bin/python" ||
        setup_die "the Python in $environment does not run, or is not 3.11, 3.12 or 3.13. Remove the folder and run this again."
    echo "$environment"
}

# One line that changes when the environment has to be looked at again: interpreter, what to install, what is installed.
setup_fingerprint() {
    "$1/bin/python" - "$2" <<'END'
import hashlib, sys
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

root = Path(sys.argv[1])
files = b"".join((root / name).read_bytes() for name in ("setup.py", "scripts/setup.sh"))
try:
    torch = version("torch")
except PackageNotFoundError:
    torch = "missing"
# Where it is installed from; pip may have been used by hand since.
urls = [text.strip() for each in distributions(name="pretraining") if (text := each.read_text("direct_url.json"))]
print(root, sys.executable, sys.version.split()[0], torch, hashlib.sha256(files).hexdigest(), *urls)
END
}

# Whether an extra, or without one what training needs, is installed as it should be.
setup_is_done() {
    [[ -f $(setup_stamp "$1" "$3") && $(setup_fingerprint "$1" "$2") == "$(<"$(setup_stamp "$1" "$3")")" ]]
}

setup_stamp() { echo "$1/.pretraining-setup${2:+-$2}"; }

# Version of the torch that is there, and whether it is "older" or "newer" than those that are supported, or "kept".
setup_find_torch() {
    "$1/bin/python" - 2>/dev/null <<'END' || true
from importlib.metadata import version

torch = version("torch")
release = tuple(int(part) for part in torch.split(".")[:2])
print(torch, "older" if release < (2, 11) else "newer" if release > (2, 15) else "kept")
END
}

# The folder of another checkout whose `pretraining` the environment has, if any.
setup_find_other_checkout() {
    "$1/bin/python" - "$2" 2>/dev/null <<'END' || true
import json, sys
from importlib.metadata import distributions
from urllib.parse import unquote, urlparse

for installed in distributions(name="pretraining"):
    origin = json.loads(installed.read_text("direct_url.json") or "{}")
    folder = unquote(urlparse(origin.get("url", "")).path)
    if origin.get("dir_info", {}).get("editable") and folder != sys.argv[1]:
        print(folder)
        break
END
}

# Runs a command as a stage, which is one line; what goes wrong is shown under it.
setup_stage() {
    setup_say "$1 ..."
    "${@:2}" >&2
}

setup_install() {
    local environment=$1 root=$2 extra=$3 python=$1/bin/python
    local found version="" fit="" other constraint=""
    local pip=("$python" -m pip install --quiet --disable-pip-version-check --no-compile)
    local hint="pip's own settings say where it looks: PIP_INDEX_URL, PIP_FIND_LINKS, 'pip config list'."
    found=$(setup_find_torch "$environment")
    read -r version fit <<<"$found" || true
    if [[ $fit == older || $fit == newer ]] && [[ -n ${VIRTUAL_ENV:-${CONDA_PREFIX:-}} ]]; then
        setup_die "the active environment $environment has torch $version, $fit than 2.11 to 2.15, which this project" \
            "runs on. Nothing was changed. Deactivate it, and .venv gets torch $TORCH_VERSION; or choose one in it" \
            "yourself: $python -m pip install torch==$TORCH_VERSION"
    fi
    other=$(setup_find_other_checkout "$environment" "$root")
    if [[ -n $other ]]; then
        setup_say "$environment has the pretraining of $other, and now gets that of $root. To use both, give each an" \
            "environment of its own"
    fi
    "$python" -m pip --version >/dev/null 2>&1 || setup_stage "installing pip" "$python" -m ensurepip ||
        setup_die "$python has no pip and cannot make one; install pip into the environment."
    if [[ $fit == kept ]]; then
        setup_say "torch $version is there, and kept"
        # Whatever the other packages ask for.
        constraint=$(mktemp)
        echo "torch==$version" >"$constraint"
        local -x PIP_CONSTRAINT="${PIP_CONSTRAINT:+$PIP_CONSTRAINT }$constraint"
    else
        setup_stage "installing torch $TORCH_VERSION" "${pip[@]}" "torch==$TORCH_VERSION" ||
            setup_die "could not install torch $TORCH_VERSION (above). $hint"
    fi
    setup_stage "installing pretraining and what ${extra:-training} needs" \
        "${pip[@]}" --editable "$root${extra:+[$extra]}" ||
        setup_die "could not install pretraining's requirements (above). $hint"
    # The extra `fast` of setup.py: never built from source.
    setup_stage "installing fastokens, a faster BPE" "${pip[@]}" --only-binary=:all: "fastokens>=0.3.5,<0.4" ||
        setup_say "fastokens has no wheel here: 'pretrain prepare' encodes with the tokenizers library, which is slower"
    # What pip would do with one process. A file for another Python is no error.
    local packages
    packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    setup_stage "compiling them" "$python" -m compileall -qq -j 0 "$packages" || true
    [[ -z $constraint ]] || rm -f "$constraint"
}

setup_main() {
    local root environment extra=$1
    [[ $extra =~ ^[a-z0-9,]*$ ]] || setup_die "'$extra' is no extra of setup.py. Call or source this with one, or with \"\"."
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
    environment=$(setup_find_environment "$root") || exit 1
    if ! setup_is_done "$environment" "$root" "$extra"; then
        # Jobs that start at the same time install once: those that waited for the lock find the work done.
        if command -v flock >/dev/null; then
            exec 9>"$environment/.pretraining-setup.lock"
            flock 9
        fi
        if ! setup_is_done "$environment" "$root" "$extra"; then
            setup_install "$environment" "$root" "$extra"
            setup_fingerprint "$environment" "$root" >"$(setup_stamp "$environment" "$extra")"
            setup_fingerprint "$environment" "$root" >"$(setup_stamp "$environment" "")"
        fi
        exec 9>&-
    fi
    setup_say "$environment is ready"
    export PATH="$environment/bin:$PATH"
}

setup_main "${1:-}"
