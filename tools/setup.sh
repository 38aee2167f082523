#!/bin/sh
# Makes .venv ready: sh tools/setup.sh [EXTRA ...]   (no extra: what users install; dev: what the tests need too)
#
# Plain POSIX sh, because it runs before anything is installed. When nothing has changed since the last
# success it returns at once and needs no network. It keeps its notes in .venv/.ermoe:
#   ready-NAME   the state (see `state`) in which NAME was last installed completely
#   installing   the listing of site-packages before an installation that has not finished
set -eu
cd "$(dirname "$0")/.."
trap 'exit 130' INT
trap 'exit 143' TERM

venv_python=.venv/bin/python
notes=.venv/.ermoe

say() { printf '%s\n' "$*" >&2; }
fail() {
    say "setup: $*"
    exit 2
}

# What an installation depends on: where the checkout lives (scripts in .venv hold that path) and two files.
state() {
    pwd -P
    cat pyproject.toml constraints.txt | cksum
}

is_ready() { # is_ready NAME
    [ -f "$notes/ready-$1" ] && [ "$(cat "$notes/ready-$1")" = "$(state)" ]
}

all_ready() { # all_ready NAME ...
    [ -x .venv/bin/ermoe ] && [ ! -f "$notes/installing" ] && "$venv_python" -c '' 2>/dev/null || return 1
    for name in "$@"; do
        # every extra brings the base along
        is_ready "$name" || { [ "$name" = base ] && { is_ready dev || is_ready bench; }; } || return 1
    done
}

is_new_enough() { # is_new_enough PYTHON
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        is_new_enough "$PYTHON" || fail "PYTHON=$PYTHON does not start a Python 3.11 or newer; name one that does."
        printf '%s\n' "$PYTHON"
        return
    fi
    for candidate in python3.11 python3 python3.12 python3.13 python3.14 python; do
        if is_new_enough "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer on PATH; install one, or name it: make setup PYTHON=/path/to/python3.11"
}

pip_is_whole() {
    "$venv_python" -c '
import importlib.metadata as m
assert all(f.locate().exists() for f in m.files("pip") if f.suffix == ".py")' >/dev/null 2>&1
}

was_moved() {
    for note in "$notes"/ready-*; do
        [ ! -f "$note" ] || [ "$(head -n 1 "$note")" = "$(pwd -P)" ] || return 0
    done
    return 1
}

packages_listing() { ls .venv/lib/python3*/site-packages 2>/dev/null | cksum; }

# A usable .venv with pip in it. One that was cut off halfway through an installation may hold half a package
# that looks whole, so it is made anew; one that was cut off while still downloading is carried on with.
ensure_venv() {
    if [ -f "$notes/installing" ] && [ "$(cat "$notes/installing")" != "$(packages_listing)" ]; then
        say "The last installation was interrupted: making .venv anew."
    elif was_moved; then
        say "The checkout has moved, and the scripts in .venv hold its old path: making .venv anew."
    elif is_new_enough "$venv_python"; then
        pip_is_whole || "$venv_python" -m ensurepip >/dev/null 2>&1 || true
        if pip_is_whole; then return; fi
        say "The pip in .venv is broken: making .venv anew."
    elif [ -e .venv ]; then
        say "The .venv here is incomplete, or its Python is gone or older than 3.11: making it anew."
    fi
    python=$(find_python)
    "$python" -m venv --clear .venv || fail "'$python -m venv .venv' failed, see above. (Debian and Ubuntu keep \
venv in a package of its own: apt install python3-venv.)"
}

ensure_uv() {
    .venv/bin/uv --version >/dev/null 2>&1 ||
        "$venv_python" -m pip install --quiet --disable-pip-version-check --force-reinstall -c constraints.txt uv
}

announce() { # announce NAME ...: sizes as measured on Linux x86_64, Python 3.11, with constraints.txt
    if ls "$notes"/ready-* >/dev/null 2>&1; then
        say "Bringing .venv up to date ($*): 0.1 GB to download at most, unless torch itself has a new version."
        return
    fi
    case " $* " in
    *" dev "*) sizes="3.2 GB to download, 6.5 GB on disk" ;;
    *) sizes="3.1 GB to download, 6 GB on disk" ;;
    esac
    say "Installing ermoe ($*) into .venv, once: about $sizes."
    say "Most of it is torch with its CUDA libraries; it runs without a GPU as well."
}

install() { # install REQUIREMENT
    if ensure_uv; then
        packages_listing >"$notes/installing"
        .venv/bin/uv pip install --python "$venv_python" -c constraints.txt -b constraints.txt -e "$1" && return
    fi
    say "uv did not manage; trying again with pip, which is slower."
    [ -f "$notes/installing" ] || packages_listing >"$notes/installing"
    "$venv_python" -m pip install --disable-pip-version-check -c constraints.txt -e "$1"
}

[ $# -gt 0 ] || set -- base
if all_ready "$@"; then exit 0; fi

ensure_venv
announce "$@"
mkdir -p "$notes"
extras=$(printf '%s,' "$@" | sed 's/base,//; s/,$//')
install ".${extras:+[$extras]}" || fail "the installation failed, see above. Once the cause is gone (network? disk \
space?), run the same command again: it carries on from here."
for name in "$@"; do state >"$notes/ready-$name"; done
rm -f "$notes/installing"
say "Ready."
