# Sourced by the scripts that set up what checks need. Such a script prints the folder that it made
# as the last line of its output. Where something cannot be had on this machine, its last line is
# the reason, and its status 75: the check is skipped.
log() { printf 'setup: %s\n' "$*" >&2; }

cannot() {
    log "$*"
    echo "$*"
    exit 75
}

# Runs apt-get, whose output would be taken for the folder's name.
apt_get() {
    local as_root=
    [ "$(id -u)" = 0 ] || as_root=sudo
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=120 "$@" >&2
}

# Fetches the lists of Debian's packages.
debian_update() {
    command -v apt-get >/dev/null && apt_get update
}

# Installs Debian's packages.
debian() {
    log "installing Debian packages: $*"
    command -v apt-get >/dev/null || cannot "no apt-get here: install by hand what Debian names $*"
    debian_update && apt_get install -y --no-install-recommends "$@" ||
        cannot "apt-get could not install $*: install them as root, then try again"
}

# Sets `python` to a Python for which a condition is true: `find_python CONDITION REASON`, where the
# reason is for a machine that has none.
find_python() {
    local attempt
    for attempt in 1 2; do
        for python in python3.11 python3; do
            if "$python" -c "import sys; sys.exit(not ($1))" 2>/dev/null; then
                return
            fi
        done
        [ "$attempt" = 2 ] || debian python3
    done
    cannot "$2"
}

# Makes the folder of an environment, unless it is there already: `make_in FOLDER MAKER`. Begins
# again when an earlier run was cut off.
make_in() {
    if [ ! -e "$1/.complete" ]; then
        mkdir -p "$(dirname "$1")"
        exec 9>"$1.lock"
        # Two at once would delete each other's work; the second waits and finds it done.
        flock 9
    fi
    if [ ! -e "$1/.complete" ]; then
        rm -rf "$1"
        "$2" "$1"
        touch "$1/.complete"
    fi
    log "$1 is complete"
    echo "$1"
}

# Makes an environment with nothing but packages of PyPI in these versions; wheels only, because a
# source package is built with whatever build tools are newest: `packages PYTHON FOLDER ARGS...`.
packages() {
    local python=$1 folder=$2
    shift 2
    "$python" -c 'import venv, ensurepip' 2>/dev/null || debian python3-venv python3-pip
    [ -e "$folder" ] || "$python" -m venv "$folder" || cannot "$python -m venv $folder failed: see above"
    "$folder/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps \
        --only-binary :all: "$@" >&2 ||
        cannot "pip could not install $* for $("$python" --version): see above (PyPI, or space in $folder)"
}
