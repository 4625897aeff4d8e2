"""LMCache's own command-line tools against `lmc serve`.

  cli_check.py --server-bin target/release/lmc [--lmcache PATH]

Starts a server of its own and runs what `lmcache` 0.5.6 offers for a running server: ping,
describe, clear, quotas, and `lmcache bench server`, which drives the whole protocol with
LMCache's own client in both transfer modes and compares checksums of what comes back.

Prints one line a check and ends with `N passed, N failed`. Every wait has a deadline.
"""

import argparse
import concurrent.futures
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request

import checks
from checks import check, finish, free_port

DEADLINE = 120


class Tools:
    """The `lmcache` command, asked for JSON."""

    def __init__(self, lmcache, http):
        self.lmcache = lmcache
        self.url = f"http://127.0.0.1:{http}"
        self.env = dict(os.environ, LMCACHE_DISABLE_BANNER="1", LMCACHE_LOG_LEVEL="ERROR")
        self.env["CUDA_VISIBLE_DEVICES"] = ""

    def run(self, *args, json_output=True):
        """Exit code and metrics (or the text when there are none)."""
        command = [self.lmcache, *args, "--url", self.url]
        if json_output:
            command += ["--format", "json"]
        done = subprocess.run(command, env=self.env, timeout=DEADLINE, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        start = done.stdout.find("{\n")
        with contextlib.suppress(ValueError):
            answer, _ = json.JSONDecoder().raw_decode(done.stdout[max(start, 0):])
            return done.returncode, answer.get("metrics", answer)
        return done.returncode, done.stdout + done.stderr

    def expect(self, name, args, **wanted):
        code, metrics = self.run(*args)
        found = {key: metrics.get(key) for key in wanted} if isinstance(metrics, dict) else metrics
        check(name, code == 0 and found == wanted, f"code {code}, found {found}, wanted {wanted}")
        return metrics


def flat(metrics):
    """All numbers of nested sections by their last name."""
    found = {}
    for key, value in metrics.items() if isinstance(metrics, dict) else ():
        if isinstance(value, dict):
            found.update(flat(value))
        else:
            found[key] = value
    return found


def bench(tools, port, mode):
    """LMCache's own round-trip benchmark, while `describe` looks at the worker it registers."""
    args = ["bench", "server", "--rpc-url", f"tcp://127.0.0.1:{port}", "--mode", "cpu",
            "--transfer-mode", mode, "--num-tokens", "512", "--num-blocks", "128",
            "--kvcache-shape-spec", "(2,128,16,2,64):float32:4",
            "--start", "0", "--end", "6", "--interval", "2"]
    # The second mode must not find what the first has stored.
    urllib.request.urlopen(urllib.request.Request(
        f"{tools.url}/cache/clear", data=b'{"tier": "l1", "force": true}', method="POST",
        headers={"content-type": "application/json"}), timeout=60).read()
    models = None
    with concurrent.futures.ThreadPoolExecutor() as pool:
        running = pool.submit(tools.run, *args)
        while not running.done():
            with urllib.request.urlopen(f"{tools.url}/status", timeout=60) as answer:
                if not (models and isinstance(models, list)) and json.load(answer)["cache_context_meta"]:
                    _, described = tools.run("describe", "kvcache")
                    models = described.get("models") if isinstance(described, dict) else described
            time.sleep(0.2)
        code, metrics = running.result()
    numbers = flat(metrics)
    check(f"bench server, {mode}: ends well", code == 0, f"code {code}: {metrics}")
    stores = numbers.get("warm_retrieve_count")
    check(f"bench server, {mode}: all 6 requests are retrieved", stores == 6, str(numbers))
    check(f"bench server, {mode}: every checksum agrees",
          numbers.get("checksum_ok") == 6 and numbers.get("checksum_fail") == 0, str(numbers))
    shown = models and isinstance(models, list) and models[0]
    ok = shown and shown["model"] == "test-model" and shown["world_size"] == 1 and shown["num_layers"] == 4
    # 2 (K, V) x 4 layers x 2 heads x 64 elements x 4 bytes.
    check(f"describe, {mode}: shows the worker's model and layout",
          bool(ok) and shown["cache_size_per_token"] == 4096, str(models))


def tools_work(tools, port):
    tools.expect("ping kvcache", ["ping", "kvcache"], status="OK")
    tools.expect("describe kvcache", ["describe", "kvcache"], health="OK", engine_type="lmc",
                 chunk_size=256, l1_capacity_gb=0.25, eviction_policy="LRU", cached_objects=0,
                 active_sessions=0)
    tools.expect("quota get before it is set", ["quota", "get", "team-a"], exists=False, limit_gb=0.0)
    tools.expect("quota set", ["quota", "set", "team-a", "--limit-gb", "1.5"],
                 cache_salt="team-a", limit_gb=1.5, status="ok")
    tools.expect("quota get", ["quota", "get", "team-a"], exists=True, limit_gb=1.5, current_usage_gb=0.0)
    listed = tools.expect("quota list", ["quota", "list"])
    check("quota list: names the salt", "team-a" in json.dumps(listed), str(listed))
    tools.expect("quota delete", ["quota", "delete", "team-a"], cache_salt="team-a", status="removed")
    tools.expect("quota delete again", ["quota", "delete", "team-a"], status="not_found")
    tools.expect("quota set without a salt", ["quota", "set", "_default", "--limit-gb", "2"],
                 cache_salt="_default", status="ok")
    tools.expect("quota delete without a salt", ["quota", "delete", "_default"], status="removed")
    code, text = tools.run("quota", "set", "team-a", "--limit-gb", "-1")
    check("quota set below zero: refused with the server's reason",
          code == 1 and "negative" in str(text), f"code {code}: {text}")
    for mode in ("engine_driven", "lmcache_driven"):
        bench(tools, port, mode)
    code, text = tools.run("kvcache", "clear", json_output=False)
    check("kvcache clear", code == 0 and "OK" in text, f"code {code}: {text}")
    tools.expect("describe kvcache: nothing is left", ["describe", "kvcache"], cached_objects=0)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--server-bin", default="target/release/lmc")
    parser.add_argument("--lmcache", default=os.path.join(os.path.dirname(sys.executable), "lmcache"))
    args = parser.parse_args()
    checks.show_passed = False
    port, http = free_port(), free_port()
    server = subprocess.Popen([args.server_bin, "serve", "--port", str(port), "--http-port", str(http),
                               # The benchmark stores block 0, which vLLM never fills.
                               "--l1-size-gb", "0.25", "--null-block-id", "-1", "--log-level", "warn"])
    tools = Tools(args.lmcache, http)
    try:
        end = time.monotonic() + 20
        while time.monotonic() < end and server.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{tools.url}/healthz", timeout=5):
                break
            time.sleep(0.05)
        tools_work(tools, port)
        server.send_signal(signal.SIGTERM)
        check("the server stops clean", server.wait(20) == 0)
    finally:
        server.kill()
        server.wait()
    code, _ = tools.run("ping", "kvcache")
    check("ping kvcache: fails without a server", code == 1, f"code {code}")
    finish()


if __name__ == "__main__":
    main()
