#!/usr/bin/env bash
# Makes a folder with the servers of S3 that `cargo xtask test-remote` and `bench remote` run: the
# crate s3s-fs, and moto of PyPI. They are in its folder bin.
#
# Prints the folder on stdout. Ends with status 75 where it cannot be had here; the last line then
# says why.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/common.sh"
S3S_FS=0.14.1

make() {
    log "making $1 (downloads about 60 MB from PyPI and crates.io the first time, and compiles for minutes)"
    packages python3 "$1" --retries 2 --timeout 20 -r "$here/moto.txt"
    # The release's optimisation across crates would take longer than all tests.
    CARGO_PROFILE_RELEASE_LTO=off cargo install s3s-fs --version "$S3S_FS" --locked --features binary --root "$1" >&2 ||
        cannot "cargo could not install s3s-fs $S3S_FS: see above (crates.io, or space in $1)"
}

key=$(cat "$here/s3.sh" "$here/moto.txt" "$here/common.sh" | sha256sum | cut -c1-12)
make_in "${LMC_CACHE_DIR:-$HOME/.cache/lmc}/s3-$key" make
