# Everything a checkout needs before it runs: sourced by ./demo and ./test, from the repository's root.
# Sets STOCKADE_PYTHON to the interpreter of a virtual environment that has Stockade installed.

say() { printf '%s\n' "$*" >&2; }

die() { say "$*"; exit 1; }

# As root on Debian or Ubuntu the packages that are missing are installed; else they are named.
need_packages() {
    local missing=() package
    command -v dpkg-query >/dev/null || return 0
    for package in "$@"; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
    done
    ((${#missing[@]})) || return 0
    if ((EUID == 0)) && command -v apt-get >/dev/null; then
        say "installing: ${missing[*]}"
        export DEBIAN_FRONTEND=noninteractive
        # An old package list may be good enough, and a new machine has none at all.
        apt-get install -qq -y --no-install-recommends "${missing[@]}" >/dev/null 2>&1 ||
            { apt-get update -qq >&2 && apt-get install -qq -y --no-install-recommends "${missing[@]}" >&2; } ||
            return 1
    else
        say "missing packages: ${missing[*]}"
        say "install them as root: apt install ${missing[*]}"
        return 1
    fi
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11; do
        command -v "$candidate" >/dev/null &&
            "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null &&
            { command -v "$candidate"; return; }
    done
    return 1
}

# set_up EXTRA: the virtual environment in .venv with this checkout and its dependencies (".[EXTRA]").
set_up() {
    local extra=$1 python stamp wanted
    python=$(find_python) || {
        need_packages python3 && python=$(find_python)
    } || die "cannot find Python 3.11 to 3.13: install one, or name it in PYTHON"
    # python-prctl is built against libcap, the launcher is linked statically; bash runs shell tasks.
    need_packages gcc libc6-dev libcap-dev bash || die "cannot build without these packages"
    if [[ $(command -v "$python") == /usr/bin/* ]]; then
        need_packages python3-venv python3-dev || die "cannot make a virtual environment without these packages"
    fi
    stamp=.venv/stockade-$extra.stamp
    wanted=$(cat pyproject.toml setup.py sandbox/*.[ch] | sha256sum; "$python" -VV; pwd)
    if [[ ! -x sandbox/launcher || ! -f $stamp || $(<"$stamp") != "$wanted" ]]; then
        say "setting up .venv"
        "$python" -m venv .venv || die "cannot make a virtual environment with $python"
        .venv/bin/python -m pip install -q --disable-pip-version-check -e ".$extra" 2>.venv/pip.log || {
            cat .venv/pip.log >&2
            die "cannot install the dependencies: see the messages above"
        }
        printf '%s' "$wanted" >"$stamp"
    fi
    STOCKADE_PYTHON=$PWD/.venv/bin/python
}
