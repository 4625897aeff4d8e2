#!/usr/bin/env bash
# A proxy that people run in front of prefill and decode engines: `router.sh` makes a Python
# environment with vllm-router from PyPI. Prints its folder on stdout, or ends with status 75 and the
# reason.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/common.sh"

make() {
    local folder=$1 python
    find_python 'sys.version_info >= (3, 10)' "no Python 3.10 or later, which vllm-router needs"
    packages "$python" "$folder" --retries 2 --timeout 20 -r "$here/router.txt"
}

key=$(cat "$here/router.sh" "$here/router.txt" "$here/common.sh" | sha256sum | cut -c1-12)
make_in "${LMC_CACHE_DIR:-$HOME/.cache/lmc}/router-$key" make
