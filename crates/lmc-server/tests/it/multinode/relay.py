"""Passes frames between two tap devices, late, and drops some: what netem does, on every kernel.

relay.py DEVICE DEVICE DELAY_MS PER_MILLE: makes the devices, prints a line, and runs until its
standard input ends.
"""
import fcntl
import heapq
import os
import random
import select
import struct
import sys
import time

TUNSETIFF = 0x400454CA
IFF_TAP_NO_PI = 0x1002


def tap(name):
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP_NO_PI))
    return device


def main():
    first, second = tap(sys.argv[1]), tap(sys.argv[2])
    delay, per_mille = float(sys.argv[3]) / 1e3, float(sys.argv[4])
    other = {first: second, second: first}
    print("up", flush=True)
    # The same losses in each run.
    chance = random.Random(1)
    late, count = [], 0
    while True:
        wait = max(0, late[0][0] - time.monotonic()) if late else None
        readable = select.select([first, second, 0], [], [], wait)[0]
        if 0 in readable and not os.read(0, 1):
            return
        for device in (device for device in readable if device):
            # Until it is up, and when it has no more frames, reading fails.
            try:
                frame = os.read(device, 1 << 16)
            except OSError:
                continue
            count += 1
            if chance.random() * 1000 >= per_mille:
                heapq.heappush(late, (time.monotonic() + delay, count, other[device], frame))
        while late and late[0][0] <= time.monotonic():
            _, _, device, frame = heapq.heappop(late)
            try:
                os.write(device, frame)
            except OSError:
                pass


main()
