#!/usr/bin/env bash
# The wheels that checks on a GPU carry along: `gpu.sh VERSION` fetches those of gpu.txt for a
# Python, such as 3.12, which the machine with the GPU has together with torch. Prints the folder
# of the wheels on stdout, with status 75 and the reason where they cannot be had.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/common.sh"
version=$1

fetch() {
    local folder=$1 python platforms=() libc
    find_python 'sys.version_info >= (3, 10)' "no Python 3.10 or later, whose pip fetches the wheels"
    mkdir -p "$folder"
    for libc in 2_17 2_26 2_27 2_28 2_34; do
        platforms+=(--platform "manylinux_${libc}_x86_64")
    done
    log "fetching $(wc -l <"$here/gpu.txt") wheels (34 MB) from PyPI"
    "$python" -m pip --disable-pip-version-check download --quiet --no-deps --only-binary=:all: \
        --python-version "$version" --implementation cp "${platforms[@]}" \
        --platform manylinux2014_x86_64 --dest "$folder" -r "$here/gpu.txt" >&2 ||
        cannot "PyPI did not give the wheels of gpu.txt for Python $version"
}

key=$(cat "$here/gpu.sh" "$here/gpu.txt" "$here/common.sh" | sha256sum | cut -c1-12)
make_in "${LMC_CACHE_DIR:-$HOME/.cache/lmc}/gpu-$version-$key" fetch
