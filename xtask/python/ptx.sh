#!/usr/bin/env bash
# The compiler of the kernels: `ptx.sh` makes a Python environment with NVRTC and ptxas from PyPI,
# neither of which needs a GPU or a driver. Prints its folder on stdout, or ends with status 75 and
# the reason. PTX of NVRTC 12.0 runs on drivers from 525 on.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/common.sh"

make() {
    local folder=$1 python
    find_python 'sys.version_info >= (3, 10)' "no Python 3.10 or later, which runs the compiler"
    packages "$python" "$folder" --retries 2 --timeout 20 -r "$here/ptx.txt"
}

key=$(cat "$here/ptx.sh" "$here/ptx.txt" "$here/common.sh" | sha256sum | cut -c1-12)
make_in "${LMC_CACHE_DIR:-$HOME/.cache/lmc}/ptx-$key" make
