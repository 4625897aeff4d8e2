#!/usr/bin/env bash
# Makes the Python environment of `cargo xtask bench p2p --race`: Mooncake Store without CUDA.
#
# Prints the environment's folder on stdout. Ends with status 75 where it cannot be had here; the
# last line then says why.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/common.sh"
MOONCAKE=0.3.13.post1

make() {
    debian libnuma1 libibverbs1 liburing2 libcurl4
    packages python3.11 "$1" "mooncake-transfer-engine-non-cuda==$MOONCAKE"
    "$1/bin/python" -c 'import mooncake.store' >&2 || cannot "mooncake.store cannot be imported: see above"
}

make_in "${LMC_CACHE_DIR:-$HOME/.cache/lmc}/mooncake-store-$MOONCAKE" make
