#!/bin/bash
# What a GPU has to prove, in one command and without a network: see `cargo xtask test-gpu --help`.
# `run.sh tests` compares bytes, `run.sh figures` measures; without a word it does both. `run.sh cpu`
# runs on tensors in host memory what needs no GPU.
# Writes its results to OUT (a folder), and ends with 0 when every check passed.
set -u
here=$(cd "$(dirname "$0")" && pwd)
OUT=${OUT:-$here/results}
mkdir -p "$OUT"
LMC=${LMC:-$here/lmc}
PYTHON=${PYTHON:-python3}
export PYTHONUNBUFFERED=1 LMCACHE_TRACK_USAGE=false LMCACHE_LOG_LEVEL=WARNING
export XDG_STATE_HOME=$(mktemp -d)
if [ -d "$here/wheels" ] && [ "${1:-}" != cpu ]; then
    site=$(mktemp -d)
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$here"/wheels/*.whl || exit 1
    export PYTHONPATH=$site
fi
port=$((20000 + RANDOM % 20000))
url=tcp://127.0.0.1:$port
http=http://127.0.0.1:$((port + 1))
failed=0
serve() { # environment and flags of the server
    env "$@" "$LMC" serve --port "$port" --http-port "$((port + 1))" --l1-size-gb "${GB:-12}" --chunk-size 256 >>"$OUT/lmc.log" 2>&1 &
    server=$!
    for _ in $(seq 200); do curl -s -o "$XDG_STATE_HOME/health" "$http/healthz" && return; sleep 0.1; done
    echo "lmc does not answer"; tail -n 5 "$OUT/lmc.log"; exit 1
}
stop() { kill "$server"; wait "$server"; }
client() { timeout 120 "$PYTHON" "$here/client.py" --url "$url" "$@" 2>>"$OUT/client.log"; }
load() { timeout 120 "$PYTHON" "$here/load.py" "$url" "$@" 2>>"$OUT/load.log"; }
# A container of its own, but for the network: other shared memory, other ids of processes.
apart() { unshare --mount --ipc --pid --fork --mount-proc bash -c 'mount -t tmpfs tmpfs /dev/shm && "$@"' _ "$@"; }
isolated() { apart timeout 120 "$PYTHON" "$here/client.py" --url "$url" --mode lmcache_driven --isolated "$@" 2>>"$OUT/client.log"; }
own() { PYTHONPATH=$here/package:${PYTHONPATH:-} timeout 240 "$PYTHON" "$here/own.py" --endpoint "$url" "$@" 2>>"$OUT/own.log" || failed=1; }
check() { # name, expected status, command
    local name=$1 expected=$2; shift 2
    local text; text=$("$@"); local status=$?
    if [ "$status" = "$expected" ]; then echo "ok      $name $text"; else echo "FAILED  $name (status $status) $text"; failed=1; fi
}
free() { nvidia-smi --query-gpu=memory.free --format=csv,noheader,nounits; }
closed() { for _ in $(seq 20); do [ $(($(free) + 64)) -ge "$before" ] && return; sleep 0.5; done; return 1; }

tests() {
    check "the driver" 0 env LMC_TEST_GPU=1 "$here/driver" --exact promises::a_driver_keeps_its_promises --nocapture
    serve
    own tests
    for mode in lmcache_driven engine_driven; do
        for layout in k_v_apart k_v_in_block heads_first latent bytes; do
            check "bytes: $mode $layout" 0 client --mode $mode --layout $layout
        done
    done
    check "bytes: blocks of 128" 0 client --mode lmcache_driven --layout k_v_in_block --block 128
    before=$(free)
    check "killed while its store waits" 137 client --mode lmcache_driven --layers 32 --chunks 64 --die
    check "its memory is free within 10 s" 0 closed
    check "after the kill" 0 client --mode lmcache_driven
    for layout in k_v_apart k_v_in_block heads_first latent bytes; do
        check "bytes: isolated $layout" 0 isolated --layout $layout
    done
    before=$(free)
    check "isolated, killed while its store waits" 137 isolated --layers 32 --chunks 64 --die
    check "its memory is free within 10 s" 0 closed
    check "isolated, after the kill" 0 isolated
    stop
    serve CUDA_VISIBLE_DEVICES=
    check "a GPU that the server does not see" 1 client --mode lmcache_driven
    stop
    serve
    export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
    check "expandable segments" 1 client --mode lmcache_driven
    own tests --only "bytes tokens_first"
    unset PYTORCH_CUDA_ALLOC_CONF
    stop
    with_mps own tests --only "bytes tokens_first 16"
    with_mps check "bytes: lmcache_driven with MPS" 0 client --mode lmcache_driven
}

figures() {
    serve
    own figures
    for block in 16 64; do
        for mode in lmcache_driven engine_driven; do
            check "rate: $mode blocks of $block" 0 client --mode $mode --layers 32 --chunks 64 --rounds 5 --block $block
        done
    done
    check "rate: isolated" 0 isolated --layers 32 --chunks 64 --rounds 5
    check "rate: neighbouring blocks" 0 client --mode lmcache_driven --layers 32 --chunks 64 --rounds 5 --sequential
    check "a matrix product beside copies" 0 load "copies of 256 MiB" "empty kernels" lmcache_driven engine_driven
    stop
    with_mps check "with MPS: a matrix product beside copies" 0 load lmcache_driven
}

with_mps() { # command; processes on the GPU share it instead of taking turns
    if ! command -v nvidia-cuda-mps-control >"$XDG_STATE_HOME/mps"; then echo "skipped with MPS: no nvidia-cuda-mps-control"; return; fi
    export CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d) CUDA_MPS_LOG_DIRECTORY=$XDG_STATE_HOME
    nvidia-cuda-mps-control -d
    trap 'echo quit | nvidia-cuda-mps-control' EXIT
    serve
    "$@"
    stop
    echo quit | nvidia-cuda-mps-control
    trap - EXIT
    unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
}

cpu() { GB=2 serve; own tests --device cpu --only bytes; stop; }

[ "${1:-}" = cpu ] || nvidia-smi --query-gpu=name,driver_version,uuid --format=csv,noheader
for part in ${1:-tests figures}; do
    case $part in
        tests | figures | cpu) $part ;;
        *) echo "unknown part $part: expected tests, figures or cpu"; exit 2 ;;
    esac
done
grep -h "refused\|WARN\|ERROR" "$OUT/lmc.log" | cut -c1-400 | tail -n 12
exit $failed
