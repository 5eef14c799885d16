"""The ranks of a program, as processes of this machine."""

import os
import socket
import subprocess
import time


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_ranks(command, world, stderr=None):
    """Returns the exit statuses and, with stderr=subprocess.PIPE, what went there. One that fails ends the others."""
    place = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment = {**os.environ, **place, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(command, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=stderr, text=True)
        for rank in range(world)
    ]
    try:
        statuses = [None]
        while None in statuses and not any(statuses):  # the others wait for one that failed
            time.sleep(0.02)
            statuses = [rank.poll() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return statuses, "".join(rank.communicate()[1] or "" for rank in ranks)
