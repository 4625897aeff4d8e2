#!/bin/bash
# What a GPU has to prove, in one command and without a network: see `cargo xtask test-gpu --help`.
# Writes its results to OUT (a folder), and ends with 0 when every check passed.
set -u
here=$(cd "$(dirname "$0")" && pwd)
OUT=${OUT:-$here/results}
mkdir -p "$OUT"
LMC=${LMC:-$here/lmc}
PYTHON=${PYTHON:-python3}
export PYTHONUNBUFFERED=1 LMCACHE_TRACK_USAGE=false LMCACHE_LOG_LEVEL=WARNING
export XDG_STATE_HOME=$(mktemp -d)
if [ -d "$here/wheels" ]; then
    site=$(mktemp -d)
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$here"/wheels/*.whl || exit 1
    export PYTHONPATH=$site
fi
port=$((20000 + RANDOM % 20000))
url=tcp://127.0.0.1:$port
http=http://127.0.0.1:$((port + 1))
failed=0
serve() { # environment and flags of the server
    env "$@" "$LMC" serve --port "$port" --http-port "$((port + 1))" --l1-size-gb 12 --chunk-size 256 >>"$OUT/lmc.log" 2>&1 &
    server=$!
    for _ in $(seq 200); do curl -s -o "$XDG_STATE_HOME/health" "$http/healthz" && return; sleep 0.1; done
    echo "lmc does not answer"; tail -5 "$OUT/lmc.log"; exit 1
}
stop() { kill "$server"; wait "$server"; }
client() { timeout 120 "$PYTHON" "$here/client.py" --url "$url" "$@" 2>>"$OUT/client.log"; }
check() { # name, expected status, command
    local name=$1 expected=$2; shift 2
    local text; text=$("$@"); local status=$?
    if [ "$status" = "$expected" ]; then echo "ok      $name $text"; else echo "FAILED  $name (status $status) $text"; failed=1; fi
}
free() { nvidia-smi --query-gpu=memory.free --format=csv,noheader,nounits; }

own() { PYTHONPATH=$here/package:${PYTHONPATH:-} timeout 240 "$PYTHON" "$here/own.py" --endpoint "tcp://127.0.0.1:$port" "$@" 2>>"$OUT/own.log" || failed=1; }

nvidia-smi --query-gpu=name,driver_version,uuid --format=csv,noheader
check "the driver" 0 env LMC_TEST_GPU=1 "$here/driver" --exact promises::a_driver_keeps_its_promises --nocapture
serve
own
for mode in lmcache_driven engine_driven; do
    for layout in k_v_apart k_v_in_block heads_first latent bytes; do
        check "bytes: $mode $layout" 0 client --mode $mode --layout $layout
    done
done
check "bytes: blocks of 128" 0 client --mode lmcache_driven --layout k_v_in_block --block 128
for block in 16 64; do
    for mode in lmcache_driven engine_driven; do
        check "rate: $mode blocks of $block" 0 client --mode $mode --layers 32 --chunks 64 --rounds 5 --block $block
    done
done
check "rate: neighbouring blocks" 0 client --mode lmcache_driven --layers 32 --chunks 64 --rounds 5 --sequential
before=$(free)
check "killed while its store waits" 137 client --mode lmcache_driven --layers 32 --chunks 64 --die
closed() { for _ in $(seq 20); do [ $(($(free) + 64)) -ge "$before" ] && return; sleep 0.5; done; return 1; }
check "its memory is free within 10 s" 0 closed
check "after the kill" 0 client --mode lmcache_driven
check "a matrix product beside copies" 0 "$PYTHON" "$here/load.py" "$url"
stop
serve CUDA_VISIBLE_DEVICES=
check "a GPU that the server does not see" 1 client --mode lmcache_driven
stop
serve
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
check "expandable segments" 1 client --mode lmcache_driven
own --only "bytes tokens_first"
unset PYTORCH_CUDA_ALLOC_CONF
stop
grep -h "refused\|WARN\|ERROR" "$OUT/lmc.log" | cut -c1-400 | tail -12
exit $failed
