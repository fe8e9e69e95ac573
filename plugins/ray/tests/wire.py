"""The wire between :mod:`.hosts`: it carries their packets late, loses some, or is cut. A program of its own.

Arguments: file descriptors of the hosts' TUN devices, by number. Each line of its input is ``HOST DELAY LOSS``: seconds
and a share, of all packets to and from that host. (Kernels without ``tc netem`` have TUN devices.)
"""

from __future__ import annotations

import heapq
import os
import random
import select
import sys
import time

_DESTINATION = 19  # byte of an IPv4 packet: the last one of its destination's address, which is a host's number + 1


def carry(devices: list[int]) -> None:
    """Carry packets until the input ends."""
    delays, losses = [0.0] * len(devices), [0.0] * len(devices)
    waiting: list[tuple[float, int, int, bytes]] = []  # when, in which order, to whom, what
    chance, number, living = random.Random(0), 0, dict(enumerate(devices))
    while True:
        pause_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready = select.select([0, *living.values()], [], [], pause_s)[0]
        if 0 in ready:
            if not (lines := os.read(0, 4096).decode()):
                return
            for host, delay, loss in map(str.split, lines.splitlines()):
                delays[int(host)], losses[int(host)] = float(delay), float(loss)
        now = time.monotonic()
        for sender, device in list(living.items()):
            try:
                packet = os.read(device, 1 << 16) if device in ready else b""
            except OSError:  # the host has ended
                del living[sender]
                continue
            if packet[:1] != b"E" or (to := packet[_DESTINATION] - 1) not in living:
                continue
            if chance.random() >= losses[sender] and chance.random() >= losses[to]:
                heapq.heappush(waiting, (now + delays[sender] + delays[to], number, to, packet))
                number += 1
        while waiting and waiting[0][0] <= now:
            *_, to, packet = heapq.heappop(waiting)
            try:
                os.write(devices[to], packet)
            except OSError:
                living.pop(to, None)


if __name__ == "__main__":
    carry([int(each) for each in sys.argv[1:]])
