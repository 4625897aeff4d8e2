#!/usr/bin/env bash
# mdBook, which makes a site of the documents. Prints its program on stdout.
#
# It lies in LMC_CACHE_DIR (~/.cache/lmc unless set), is compiled from crates.io, and needs no network
# once it is there. Ends with status 75 where it cannot be had; the last line then says why.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/common.sh"

make() {
    local folder=$1
    command -v cargo >/dev/null || cannot "no cargo here"
    log "making $folder (compiles mdBook, some minutes)"
    env -u CARGO_TARGET_DIR cargo install --locked --version 0.4.52 --no-default-features \
        --features search --root "$folder" mdbook >&2 || cannot "mdBook cannot be installed: see above"
}

key=$(cat "$here/mdbook.sh" "$here/common.sh" | sha256sum | cut -c1-12)
make_in "${LMC_CACHE_DIR:-$HOME/.cache/lmc}/mdbook-$key" make
