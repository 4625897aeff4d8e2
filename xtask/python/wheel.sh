#!/usr/bin/env bash
# What the wheel is built with: `wheel.sh GLIBC` makes a Python environment with maturin, with the
# linker `bin/zigcc` and the C++ compiler `bin/cxx/g++`, both for that glibc. Prints the
# environment's folder on stdout.
#
# The environment lies in LMC_CACHE_DIR (~/.cache/lmc unless set) under a name for what goes into
# it. Quick when it is complete. Ends with status 75 where what is missing cannot be had here; the
# last line then says why.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/common.sh"
glibc=$1

# Prints a program that runs a compiler of zig for that glibc; `folder` is the environment.
zig() {
    cat <<END
#!/bin/sh
export PATH="$folder/bin:\$PATH" ZIG_GLOBAL_CACHE_DIR="$folder/zig"
exec cargo-zigbuild zig $1 -- -target $(uname -m)-linux-gnu.$glibc "\$@"
END
}

make() {
    local folder=$1 python
    log "making $folder (downloads about 110 MB from PyPI the first time)"
    # The wheel is tried with the environment's Python, so that must be one for which it is made.
    find_python 'sys.version_info >= (3, 10)' \
        "no Python 3.10 or later, for which the wheel is made: install it so that python3 runs"
    packages "$python" "$folder" --retries 2 --timeout 20 -r "$here/wheel.txt"
    mkdir "$folder/bin/cxx"
    zig cc >"$folder/bin/zigcc"
    zig c++ >"$folder/bin/cxx/g++"
    chmod +x "$folder/bin/zigcc" "$folder/bin/cxx/g++"
}

key=$(cat "$here/wheel.sh" "$here/wheel.txt" "$here/common.sh" | sha256sum | cut -c1-12)
make_in "${LMC_CACHE_DIR:-$HOME/.cache/lmc}/wheel-$glibc-$key" make
