#!/usr/bin/env python3
"""What ranks on two hosts are told, and when, as the network between them fails.

    two_hosts.py RANK_PROGRAM [CASE ...]

The hosts are network namespaces with a switch between them, so this needs root and iproute2 (`ip`, `tc`); without it
says so and exits with 3. Prints each case with times and texts; exits with 1 if one is not as it should be. A rank
must end by itself within its timeout and 5 s of what happens, and name what is wrong.
"""
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

TIMEOUT = 4  # of the ranks' process group, in seconds
GRACE = 5
PORT = 29500
ADDRESS = {"a": "10.77.0.1", "b": "10.77.0.2"}
NAMES = {host: f"fsdp-{os.getpid()}-{host}" for host in ("a", "b", "switch")}


def sh(*words):
    subprocess.run(words, check=True, capture_output=True, text=True)


def ip(host, *words):
    sh("ip", "-n", NAMES[host], *words)


class TwoHosts:
    """Hosts a and b, and a switch that both are plugged into. Removed at the end, with all that runs there."""

    def __enter__(self):
        for host in NAMES:
            sh("ip", "netns", "add", NAMES[host])
            ip(host, "link", "set", "lo", "up")
        ip("switch", "link", "add", "name", "sw0", "type", "bridge")
        ip("switch", "link", "set", "sw0", "up")
        for host, address in ADDRESS.items():
            sh("ip", "link", "add", "eth0", "netns", NAMES[host], "type", "veth", "peer", "name", f"to_{host}",
               "netns", NAMES["switch"])
            ip("switch", "link", "set", f"to_{host}", "up", "master", "sw0")
            ip(host, "addr", "add", f"{address}/24", "dev", "eth0")
            ip(host, "link", "set", "eth0", "up")
        return self

    def __exit__(self, *_):
        for name in NAMES.values():
            subprocess.run(["ip", "netns", "del", name], check=False)
            shutil.rmtree(f"/etc/netns/{name}", ignore_errors=True)

    def cut(self):
        """Both keep their carrier, and hear nothing of each other."""
        ip("switch", "link", "set", "to_b", "nomaster")

    def mend(self):
        ip("switch", "link", "set", "to_b", "master", "sw0")

    def slow_down(self):
        for host in ADDRESS:
            sh("tc", "-n", NAMES[host], "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "256kbit", "burst",
               "32kbit", "latency", "4s")

    def resolve_own_names_to_loopback(self):
        """As Debian's installer does: 127.0.1.1 for a host's own name."""
        own = subprocess.run(["hostname"], capture_output=True, text=True, check=True).stdout.strip()
        for host, other in (("a", "b"), ("b", "a")):
            folder = pathlib.Path("/etc/netns") / NAMES[host]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text(
                f"127.0.0.1 localhost\n127.0.1.1 {own} node-{host}\n{ADDRESS[other]} node-{other}\n")

    def await_connection(self, host, limit=60):
        """Until a process there has one to the port of the store."""
        end = time.monotonic() + limit
        while time.monotonic() < end:
            table = subprocess.run(["ip", "netns", "exec", NAMES[host], "cat", "/proc/net/tcp",
                                    "/proc/net/tcp6"], capture_output=True, text=True, check=True).stdout
            if any(f"{PORT:04X} 01 " in line for line in table.splitlines()):
                return
            time.sleep(0.05)
        raise AssertionError(f"no connection from host {host}")

    def left_running(self):
        return "".join(
            subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=True).stdout
            for name in NAMES.values()).split()


class Rank:
    def __init__(self, host, rank, world=2, steps=100000, timeout=TIMEOUT, master=ADDRESS["a"], **variables):
        environment = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0", MASTER_ADDR=master,
                           MASTER_PORT=str(PORT), OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR", **variables)
        self.name = f"rank {rank} on host {host}"
        self.file = tempfile.NamedTemporaryFile("w+")
        self.process = subprocess.Popen(["ip", "netns", "exec", NAMES[host], sys.argv[1], str(timeout), str(steps)],
                                        env=environment, stdout=self.file, stderr=subprocess.STDOUT)
        self.ended = None

    def output(self):
        return pathlib.Path(self.file.name).read_text()

    def await_text(self, text, limit=120):
        end = time.monotonic() + limit
        while text not in self.output() and self.process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        if text not in self.output():
            raise AssertionError(f"{self.name} does not say '{text}':\n{self.output()}")

    def vanish(self):
        """Without a word to the other side, where the link is cut."""
        self.process.kill()
        self.process.wait()

    def await_end(self, limit, begin):
        """Seconds from `begin`; None if it had to be killed at `limit`."""
        while self.process.poll() is None and time.monotonic() < begin + limit:
            time.sleep(0.02)
        took = time.monotonic() - begin
        if self.process.poll() is None:
            self.vanish()
            return None
        return took

    def told(self):
        """What it failed of, without the backends' stacks."""
        lines = [line for line in self.output().splitlines() if line.startswith("failed after")]
        return lines[0] if lines else self.output()[-2000:]


def training(hosts):
    """Both ranks, some steps into a training."""
    ranks = [Rank("a", 0), Rank("b", 1)]
    for rank in ranks:
        rank.await_text("step 3\n")
    return ranks


def expect_failure(ranks, limit, *texts, since=None):
    since = since or time.monotonic()
    for rank in ranks:
        took = rank.await_end(limit + 10, since)
        told = rank.told()
        print(f"  {rank.name}: " + ("had to be killed" if took is None else f"ended after {took:.1f} s") + f": {told}")
        if took is None or took > limit:
            raise AssertionError(f"{rank.name}: expected an end within {limit} s")
        if rank.process.returncode != 1:
            raise AssertionError(f"{rank.name}: exit code {rank.process.returncode}")
        for text in texts:
            if text not in told:
                raise AssertionError(f"{rank.name} does not say '{text}'")


def expect_success(ranks, limit):
    begin = time.monotonic()
    for rank in ranks:
        took = rank.await_end(limit, begin)
        print(f"  {rank.name}: " + (f"ended after {took:.1f} s" if took else "had to be killed"))
        if took is None or rank.process.returncode != 0:
            raise AssertionError(f"{rank.name}: exit code {rank.process.returncode}\n{rank.output()}")


def link_cut(hosts):
    ranks = training(hosts)
    hosts.cut()
    expect_failure(ranks, TIMEOUT + GRACE, "failed on rank")


def host_of_rank_1_vanishes(hosts):
    ranks = training(hosts)
    hosts.cut()
    ranks[1].vanish()
    expect_failure(ranks[:1], TIMEOUT + GRACE, "No word from rank 1")


def host_of_rank_0_vanishes(hosts):
    ranks = training(hosts)
    hosts.cut()
    ranks[0].vanish()
    expect_failure(ranks[1:], TIMEOUT + GRACE, "the rank that serves it, as a rule rank 0, has ended")


def half_open(hosts):
    """Rank 1 ended unseen, and what rank 0 sends is answered by a reset."""
    ranks = training(hosts)
    hosts.cut()
    ranks[1].vanish()
    time.sleep(1)
    hosts.mend()
    expect_failure(ranks[:1], TIMEOUT + GRACE, "failed on rank 0")


def link_cut_while_ranks_come(hosts):
    timeout = 20
    ranks = [Rank("a", 0, world=3, timeout=timeout), Rank("b", 1, world=3, timeout=timeout)]
    hosts.await_connection("b")
    time.sleep(1)
    hosts.cut()
    expect_failure(ranks, timeout + GRACE, "process group 'world' of ranks 0, 1, 2 can not be made")


def slow_link(hosts):
    hosts.slow_down()
    expect_success([Rank("a", 0, steps=5, timeout=60), Rank("b", 1, steps=5, timeout=60)], 120)


def names_that_are_loopback(hosts):
    hosts.resolve_own_names_to_loopback()
    expect_success([Rank("a", 0, steps=3, master="node-a"), Rank("b", 1, steps=3, master="node-a")], 60)


def loopback_interface(hosts):
    ranks = [Rank("a", 0, timeout=60), Rank("b", 1, timeout=60, GLOO_SOCKET_IFNAME="lo")]
    expect_failure(ranks, 40, "rank 1: GLOO_SOCKET_IFNAME names 'lo'", "eth0 10.77.0.2")


def silent_port(hosts):
    listener = subprocess.Popen(
        ["ip", "netns", "exec", NAMES["a"], sys.executable, "-c",
         f"import socket, time; s = socket.create_server(('', {PORT})); time.sleep(1000)"])
    time.sleep(2)
    try:
        expect_failure([Rank("b", 1)], TIMEOUT + GRACE + 20, "what listens there has said nothing")
    finally:
        listener.kill()
        listener.wait()


def a_world_after_a_failed_one(hosts):
    """On the same port."""
    ranks = training(hosts)
    ranks[1].vanish()
    expect_failure(ranks[:1], TIMEOUT + GRACE, "failed on rank 0")
    expect_success([Rank("a", 0, steps=3), Rank("b", 1, steps=3)], 60)


CASES = [link_cut, host_of_rank_1_vanishes, host_of_rank_0_vanishes, half_open, link_cut_while_ranks_come, slow_link,
         names_that_are_loopback, loopback_interface, silent_port, a_world_after_a_failed_one]


def may_make_networks():
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        return False
    name = f"fsdp-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return made


def main():
    if not may_make_networks():
        print("SKIPPED: network namespaces need root and iproute2 (ip, tc)")
        return 3
    failed = []
    for case in CASES:
        if sys.argv[2:] and case.__name__ not in sys.argv[2:]:
            continue
        print(f"{case.__name__} (timeout {TIMEOUT} s)", flush=True)
        with TwoHosts() as hosts:
            try:
                case(hosts)
                if hosts.left_running():
                    raise AssertionError(f"still running: {hosts.left_running()}")
            except AssertionError as error:
                print(f"  NOT AS IT SHOULD BE: {error}")
                failed.append(case.__name__)
                for pid in hosts.left_running():
                    os.kill(int(pid), 9)
    print(f"failed: {', '.join(failed)}" if failed else "all as they should be")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
