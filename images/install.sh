#!/bin/sh
# What the builder stages run. `dependencies EXTRAS VARIANT TORCH` makes a virtual environment of exactly the files that the lock
# names, by their sha256; `locked EXTRAS` prints them; `code` installs Holdfast itself. The same inputs give the same bytes: no
# caches, no times, no build paths.
# TORCH is a requirement (torch, torch==2.13.0+cpu, ...), or `base`, which uses the torch of the base image. Empty: the torch of
# torch.VARIANT.lock; without that lock the CPU wheel where VARIANT is `cpu`, else what pip's index has. Torch is checked as
# well where TORCH is empty, or is the version of that lock.
set -eu
umask 022

root=/opt/holdfast
pip_version=25.3 # of the builder only: no image has a pip
export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
export PYTHONDONTWRITEBYTECODE=1 PYTHONHASHSEED=0

pip="/build/tools/bin/python -m pip --python $root/venv/bin/python"
pip() { $pip "$@"; }

# Byte code that needs no check of the source's time, so that a read-only image starts fast. Some packages carry
# templates that are no Python; they are left alone.
compile() { "$root/venv/bin/python" -m compileall -qq --invalidation-mode unchecked-hash "$1" || :; }

# Takes out what no step runs: tests of large libraries, torch's own test programs, and where nothing is compiled, headers.
trim() {
    for name in matplotlib networkx numpy pandas pyarrow scipy sklearn sympy; do
        [ ! -d "$1/$name" ] || find "$1/$name" -type d -name tests -prune -exec rm -rf {} +
    done
    rm -rf "$1/torch/test" "$1/pyarrow/include"
    [ ! -d "$1/torch/bin" ] || find "$1/torch/bin" -type f ! -name torch_shm_manager -delete
    case $2 in *deepspeed*) ;; *) rm -rf "$1/torch/include" "$1/torch/share" ;; esac
}

# The lines of the lock that one of these extras needs.
locked() {
    awk -v extras="$1" '
        BEGIN { count = split(extras, names, ","); for (i = 1; i <= count; i++) wanted[names[i]] = 1 }
        /^#/ || NF == 0 { next }
        { needed = split($NF, needs, ","); for (i = 1; i <= needed; i++) if (needs[i] in wanted) { print; next } }
    ' lock.txt
}

# Whether the lock of this VARIANT has the torch of this TORCH.
torch_is_locked() { [ -s "torch.$1.lock" ] && { [ -z "$2" ] || grep -q "^$2 " "torch.$1.lock"; }; }

dependencies() {
    python3 -m venv /build/tools
    locked builder >/build/builder.txt
    /build/tools/bin/python -m pip install --quiet --require-hashes --no-deps --requirement /build/builder.txt
    site=--without-pip
    [ "$3" != base ] || site="--without-pip --system-site-packages"
    # shellcheck disable=SC2086 # two words
    python3 -m venv $site "$root/venv"
    locked "$1" >/build/locked.txt
    grep '^setuptools==' /build/locked.txt >/build/setuptools.txt
    pip install --quiet --no-compile --require-hashes --no-deps --requirement /build/setuptools.txt
    # Nothing but what is locked: no resolver, and no isolated build with tools that are not locked.
    pip install --quiet --no-compile --require-hashes --no-deps --no-build-isolation --requirement /build/locked.txt
    # What the base brings still has to be what pyproject.toml asks for; without a lock torch has the version of the constraints.
    if [ "$3" != base ] && torch_is_locked "$2" "$3"; then
        pip install --quiet --no-compile --require-hashes --no-deps --requirement "torch.$2.lock"
    elif [ "$3" != base ]; then
        echo "torch and the libraries of its accelerator are not checked by hash: images/torch.$2.lock has no ${3:-torch}" >&2
        export PIP_CONSTRAINT=/build/constraints.txt
        # shellcheck disable=SC2086 # several words
        case $2 in
        cpu) TORCH=$3 sh torch.sh cpu $pip install --quiet --no-compile ;;
        *) pip install --quiet --no-compile "${3:-torch}" ;;
        esac
        unset PIP_CONSTRAINT
    fi
    # An empty Holdfast stands for the real one, so that this layer changes with the lock only. With all of its extras it asks
    # for nothing that is not installed by now.
    touch README.md LICENSE
    mkdir -p holdfast && touch holdfast/__init__.py
    pip install --quiet --no-compile --no-index --no-build-isolation ".[$1]"
    pip check
    pip uninstall --quiet --yes holdfast
    for site in "$root"/venv/lib/python3.*/site-packages; do echo "$root/code" >"$site/holdfast.pth"; done
    for site in "$root"/venv/lib/python3.*/site-packages; do trim "$site" "$1"; done
    find "$root/venv" -name __pycache__ -prune -exec rm -rf {} +
    compile "$root/venv/lib"
}

code() {
    pip install --quiet --no-compile --no-deps --no-build-isolation --no-index --target "$root/code" .
    install -m 0755 images/selfcheck.py "$root/code/bin/holdfast-selfcheck"
    compile "$root/code"
}

command=$1
shift
"$command" "$@"
