#!/usr/bin/env bash
# Fetches NIXL for LMCache's part in `cargo xtask bench p2p --race`: `lmcache_p2p.sh PYTHON`, where
# PYTHON is that of the environment with LMCache.
#
# Prints the folder of the packages on stdout, for PYTHONPATH. Ends with status 75 where they cannot
# be had here; the last line then says why.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/common.sh"
NIXL=1.5.1
python=$1

make() {
    log "making $1 (downloads about 60 MB from PyPI the first time)"
    "$python" -m pip --disable-pip-version-check install --quiet --no-deps --only-binary :all: \
        --target "$1" "nixl-cu12==$NIXL" >&2 ||
        cannot "pip could not install nixl-cu12 $NIXL for $python: see above"
    # LMCache imports it by the name of a package that chooses by the CUDA of torch.
    ln -s nixl_cu12 "$1/nixl"
    PYTHONPATH=$1 "$python" -c 'import nixl._api' >&2 || cannot "nixl cannot be imported: see above"
}

make_in "${LMC_CACHE_DIR:-$HOME/.cache/lmc}/lmcache-nixl-$NIXL" make
