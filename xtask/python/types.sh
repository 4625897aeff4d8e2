#!/usr/bin/env bash
# The type checker of the Python package: `types.sh` makes a Python environment with mypy from PyPI.
# Prints its folder on stdout, or ends with status 75 and the reason.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/common.sh"

make() {
    local folder=$1 python
    find_python 'sys.version_info >= (3, 10)' "no Python 3.10 or later, which runs the type checker"
    packages "$python" "$folder" --retries 2 --timeout 20 -r "$here/types.txt"
}

key=$(cat "$here/types.sh" "$here/types.txt" "$here/common.sh" | sha256sum | cut -c1-12)
make_in "${LMC_CACHE_DIR:-$HOME/.cache/lmc}/types-$key" make
