"""Named checks that print one line each and are counted."""

import os
import random
import socket
import sys

passed, failed, skipped = 0, [], 0
# What a check may fail with and why, by the head of its name; such a failure is not counted.
known_faults = {}
# Whether a check that passed says what it found, too.
show_passed = True


def check(name, ok, detail=""):
    """Counts and prints one check."""
    global passed
    known = [why for what, why in known_faults.items() if name.startswith(what)]
    if known and not ok:
        print(f"KNOWN {name}: {known[0]}", flush=True)
        return ok
    print(f"{'PASS' if ok else 'FAIL'} {name}{': ' + detail if detail and (show_passed or not ok) else ''}", flush=True)
    if ok:
        passed += 1
    else:
        failed.append(name)
    return ok


def skip(name, why):
    """Counts checks that cannot be made on this machine, and prints why."""
    global skipped
    print(f"SKIPPED {name}: {why}", flush=True)
    skipped += 1


def finish():
    """Ends the program: the totals, and exit code 1 when a check has failed."""
    left_out = f", {skipped} skipped" if skipped else ""
    print(f"{passed} passed, {len(failed)} failed{left_out}")
    sys.exit(1 if failed else 0)


given = set()


def free_port():
    """A port that is free, another each time, and below those that the kernel gives to clients that
    asks for any (net.ipv4.ip_local_port_range)."""
    while True:
        port = random.randrange(20_000, 32_000)
        if port in given:
            continue
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                continue
            given.add(port)
            return port


def cpu(process):
    """Seconds of CPU that all threads of a process have used."""
    nanos = 0
    for task in os.listdir(f"/proc/{process}/task"):
        try:
            with open(f"/proc/{process}/task/{task}/schedstat") as stat:
                nanos += int(stat.read().split()[0])
        except FileNotFoundError:
            pass
    return nanos / 1e9
