# Sourced by scripts/demo and scripts/test, with ROOT set to the checkout. Works in bash 3.2, which macOS has.
#
#   setup run    what running a model needs
#   setup dev    that, and what the tests need
#
# Makes .venv, installs this checkout into it and fetches the embedded model, each only where it is not done
# yet. Leaves the shell in ROOT.

VENV="$ROOT/.venv"
SYSTEM="$(uname -s)"

if [ "$SYSTEM" = Darwin ]; then
    NEEDED_PYTHON="native (arm64) Python 3.10 or later"
    HOW_TO_GET_IT="'brew install python@3.13', or the installer from python.org"
else
    NEEDED_PYTHON="Python 3.10 or later"
    HOW_TO_GET_IT="install python3 and python3-venv with the system's package manager"
fi

setup() {
    check_platform
    make_venv
    cd "$ROOT" || exit 1
    install "$1"
    .venv/bin/python scripts/fetch_model.py
}

say() { printf '%s\n' "$*" >&2; }

fail() {
    say "error: $*"
    exit 1
}

# Runs a command silently, unless it fails.
quietly() {
    local output
    output="$("$@" 2>&1)" && return
    say "$output"
    fail "'$*' failed; what it said is above"
}

check_platform() {
    case "$SYSTEM" in
        Linux) command -v g++ >/dev/null || say "note: there is no g++, so MLX cannot fuse kernels and is slower" ;;
        Darwin) check_mac ;;
        *) fail "tinyllm runs on macOS and Linux, and this is $SYSTEM" ;;
    esac
}

check_mac() {
    [ "$(uname -m)" = arm64 ] && return
    if [ "$(sysctl -n hw.optional.arm64 2>/dev/null)" = 1 ]; then
        fail "MLX needs Apple Silicon, and this shell runs under Rosetta: try 'arch -arm64 $0'"
    fi
    fail "MLX needs Apple Silicon, and this Mac has an Intel processor"
}

# ---------------------------------------------------------------- Python and its environment

make_venv() {
    local python
    if [ -z "${TINYLLM_PYTHON:-}" ] && is_whole_venv; then
        return
    fi
    python="$(find_python)" || exit 1
    if is_whole_venv && [ "$(identity "$python")" = "$(identity "$VENV/bin/python")" ]; then
        return
    fi
    say "making .venv with $("$python" --version)"
    quietly "$python" -m venv --clear "$VENV"
    quietly "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade pip
}

is_whole_venv() { is_usable "$VENV/bin/python" && "$VENV/bin/python" -m pip --version >/dev/null 2>&1; }

find_python() {
    local python without_venv=""
    if [ -n "${TINYLLM_PYTHON:-}" ]; then
        is_usable "$TINYLLM_PYTHON" || fail "TINYLLM_PYTHON is '$TINYLLM_PYTHON', which is no $NEEDED_PYTHON"
        set -- "$TINYLLM_PYTHON"
    else
        set -- python3.13 python3.12 python3.11 python3.10 python3
    fi
    for python in "$@"; do
        is_usable "$python" || continue
        if "$python" -c 'import ensurepip, venv' 2>/dev/null; then
            printf '%s\n' "$python"
            return
        fi
        without_venv="$python"
    done
    if [ -n "$without_venv" ]; then
        fail "$without_venv has no venv: on Debian or Ubuntu, 'sudo apt install $(venv_package "$without_venv")'"
    fi
    fail "there is no $NEEDED_PYTHON here: $HOW_TO_GET_IT (or set TINYLLM_PYTHON to one)"
}

is_usable() {
    "$1" -c '
import platform, sys
native = sys.platform != "darwin" or platform.machine() == "arm64"
sys.exit(not (native and sys.version_info >= (3, 10)))' 2>/dev/null
}

identity() { "$1" -c 'import sys; print(sys.version, sys.base_prefix)'; }

venv_package() { "$1" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])'; }

# ---------------------------------------------------------------- this checkout, installed

install() {
    local stamp extras
    stamp="$(stamp)"
    [ "$(cat ".venv/.installed-$1" 2>/dev/null)" = "$stamp" ] && return
    extras="$(extras "$1")"
    say "installing tinyllm into .venv (a few minutes the first time)"
    quietly .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-input -e ".${extras:+[$extras]}"
    printf '%s\n' "$stamp" >.venv/.installed-run
    if [ "$1" = dev ]; then
        printf '%s\n' "$stamp" >.venv/.installed-dev
    fi
}

# All that an installation depends on: while it stays the same, there is nothing to install.
stamp() { printf '%s %s %s' "$(cksum <pyproject.toml)" "$(identity .venv/bin/python | cksum)" "$ROOT"; }

# macOS's MLX brings Metal. On Linux it is the CPU's, whatever card there may be: CUDA is a choice to make by hand.
extras() {
    case "$SYSTEM-$1" in
        Linux-run) printf 'cpu' ;;
        Linux-dev) printf 'cpu,dev' ;;
        Darwin-dev) printf 'dev' ;;
    esac
}
