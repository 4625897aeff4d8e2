#!/usr/bin/env bash
# What NIXL channels are built and tested with.
#
#   nixl.sh tools    g++ and libclang, which building nixl-sys needs
#   nixl.sh          a Python environment with NIXL's library in it; prints its folder on stdout
#
# The environment lies in LMC_CACHE_DIR (~/.cache/lmc unless set) under a name for what goes into
# it. Quick when it is complete. Ends with status 75 where what is missing cannot be had here; the
# last line then says why.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/common.sh"

exists() { compgen -G "$1" >/dev/null; }

has_libclang() {
    [ -n "${LIBCLANG_PATH:-}" ] ||
        { { exists '/usr/lib/llvm-*/lib/libclang.so*' || exists '/usr/lib/llvm-*/lib/libclang-[0-9]*.so*'; } && exists '/usr/lib/llvm-*/lib/clang/*/include/stdbool.h'; }
}

# The library and its headers, in the version that the distribution's libclang-dev stands for. That
# package itself brings the whole of LLVM; it is taken where the distribution names the parts
# differently.
libclang_packages() {
    local version
    version=$(LC_ALL=C apt-cache depends libclang-dev 2>/dev/null |
        sed -n 's/^ *Depends: libclang-\([0-9]*\)-dev$/\1/p' | head -1)
    if [ -n "$version" ] && apt-cache show "libclang1-$version" "libclang-common-$version-dev" >/dev/null 2>&1; then
        echo "libclang1-$version libclang-common-$version-dev"
    else
        echo libclang-dev
    fi
}

tools() {
    local missing=()
    command -v g++ >/dev/null || missing+=(g++)
    if ! has_libclang; then
        # A new machine has no lists to look names up in.
        debian_update || cannot "libclang is missing and apt-get cannot update its lists: install libclang with its headers, or set LIBCLANG_PATH"
        missing+=($(libclang_packages))
    fi
    [ ${#missing[@]} = 0 ] || debian "${missing[@]}"
}

make() {
    local folder=$1 site
    log "making $folder (downloads about 85 MB from PyPI the first time)"
    # The wheel asks for torch, which nothing of this needs.
    packages python3 "$folder" --retries 2 --timeout 20 nixl-cu12==1.5.1 numpy==2.3.5
    site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    ln -s "$site/.nixl_cu12.mesonpy.libs/libnixl_capi.so" "$folder/libnixl_capi.so"
    [ -e "$folder/libnixl_capi.so" ] || { log "the wheel has no libnixl_capi.so where it was"; exit 1; }
}

if [ "${1:-}" = tools ]; then
    tools
    exit 0
fi
key=$(cat "$here/nixl.sh" "$here/common.sh" | sha256sum | cut -c1-12)
make_in "${LMC_CACHE_DIR:-$HOME/.cache/lmc}/nixl-$key" make
