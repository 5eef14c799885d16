#!/usr/bin/env python3
"""What ranks on two hosts are told, and when, as the network between them fails.

    two_hosts.py RANK_PROGRAM [CASE ...]

The hosts are network namespaces (network.py), so this needs root and iproute2 (`ip`, `tc`). Prints each case with times
and texts. A rank must end by itself within its timeout and 5 s of what happens, and name what is wrong; nothing it
started may run on, no file may stay.

Exits with 0 when all is as it should be, 1 when a case is not, 2 for a case that does not exist, 3 (SKIPPED) where no
networks can be made, and 128 and the signal's number when it is ended by SIGINT, SIGTERM or SIGHUP, after cleaning up.
"""
import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

from network import (ADDRESS, NOBODY, PORT, TwoHosts, configurations, may_make_networks, namespaces, own_prefix,
                     processes_in)

TIMEOUT = 4  # of the ranks' process group, in seconds
GRACE = 5
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# What the texts hold, as regular expressions.
COLLECTIVE = r"(all-gather|reduce-scatter) of unit '\(root\)' \(number 0\)"
SERVER_GONE = "the rank that serves it, as a rule rank 0, has ended, or its host or the link to it is down"


def failed_operation(rank, world):
    """Says the operation, the rank and the group."""
    ranks = ", ".join(str(each) for each in range(world))
    return rf"{COLLECTIVE} failed on rank {rank} in group 'world(/\w+)?' of ranks {ranks} \(gloo\)"


class Interrupted(Exception):
    def __init__(self, number):
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.number = number


class Signals:
    """A signal is taken where this program waits, so that what it has begun is known to the clean-up."""

    came = None

    @classmethod
    def listen(cls):
        for number in SIGNALS:
            signal.signal(number, cls._note)

    @classmethod
    def _note(cls, number, _):
        cls.came = cls.came or number

    @classmethod
    def check(cls):
        if cls.came:
            raise Interrupted(cls.came)


def wait_until(reached, limit):
    """Whether it was reached within `limit` seconds."""
    end = time.monotonic() + limit
    while not reached():
        Signals.check()
        if time.monotonic() >= end:
            return False
        time.sleep(0.02)
    return True


class Rank:
    def __init__(self, hosts, host, rank, world=2, steps=100000, timeout=TIMEOUT, master=ADDRESS["a"], **variables):
        environment = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0", MASTER_ADDR=master,
                           MASTER_PORT=str(PORT), OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR")
        self.rank = rank
        self.name = f"rank {rank} on host {host}"
        self.file = tempfile.NamedTemporaryFile("w+")
        self.begin = time.monotonic()
        self.process = hosts.start(host, [sys.argv[1], str(timeout), str(steps)], {**environment, **variables},
                                   self.file)

    def output(self):
        return pathlib.Path(self.file.name).read_text()

    def ended(self):
        return self.process.poll() is not None

    def await_text(self, text, limit=120):
        wait_until(lambda: text in self.output() or self.ended(), limit)
        if text not in self.output():
            raise AssertionError(f"{self.name} does not say '{text}':\n{self.output()}")

    def vanish(self):
        """Without a word to the other side, where the link is cut."""
        self.process.kill()
        self.process.wait()

    def end_within(self, limit, since):
        """Prints and returns the seconds that it took after `since`; None if it had to be killed."""
        ended = wait_until(self.ended, since + limit - time.monotonic())
        took = time.monotonic() - since
        if not ended:
            self.vanish()
        print(f"  {self.name}: " + (f"ended after {took:.1f} s: " if ended else "had to be killed: ") + self.told())
        return took if ended else None

    def told(self):
        """What it failed of, without the backends' stacks, or the last it said."""
        lines = self.output().splitlines()
        failures = [line for line in lines if line.startswith("failed after")]
        return (failures or lines[-1:] or ["nothing"])[0]


def expect_failure(limit, since, expected):
    """Of each rank in `expected` within `limit` seconds after `since`, with a text where all its patterns match."""
    faults = []
    for rank, patterns in expected.items():
        took = rank.end_within(limit + 10, since)
        if took is None or took > limit:
            faults.append(f"{rank.name} did not end within {limit} s")
        if rank.process.returncode != 1:
            faults.append(f"{rank.name} has exit code {rank.process.returncode}")
        faults += [f"{rank.name} does not say '{each}'" for each in patterns if not re.search(each, rank.told())]
    if faults:
        raise AssertionError("; ".join(faults))


def expect_success(ranks, limit=60):
    begin = time.monotonic()
    for rank in ranks:
        if rank.end_within(limit, begin) is None or rank.process.returncode != 0:
            raise AssertionError(f"{rank.name} has exit code {rank.process.returncode}:\n{rank.output()}")


def training(hosts, per_host=1, timeout=TIMEOUT):
    """Ranks some steps into a training, those of host a first."""
    world = 2 * per_host
    ranks = [Rank(hosts, "a" if rank < per_host else "b", rank, world=world, timeout=timeout,
                  LOCAL_RANK=str(rank % per_host)) for rank in range(world)]
    for rank in ranks:
        rank.await_text("step 3\n")
    return ranks


def without_the_other_host(ranks):
    """What ranks say of which half can not be heard: host a serves the store, and knows who is silent."""
    half = len(ranks) // 2
    silent = ", ".join(str(rank.rank) for rank in ranks[half:])
    return {rank: [failed_operation(rank.rank, len(ranks)),
                   rf"No word from rank {silent}\." if rank.rank < half else SERVER_GONE] for rank in ranks}


def link_cut(hosts, per_host=1):
    ranks = training(hosts, per_host)
    begin = time.monotonic()
    hosts.cut()
    expect_failure(TIMEOUT + GRACE, begin, without_the_other_host(ranks))


def link_cut_between_two_ranks_each(hosts):
    link_cut(hosts, per_host=2)


def one_vanishes(hosts, which):
    ranks = training(hosts)
    begin = time.monotonic()
    hosts.cut()
    ranks[which].vanish()
    expected = without_the_other_host(ranks)
    expect_failure(TIMEOUT + GRACE, begin, {ranks[1 - which]: expected[ranks[1 - which]]})


def host_of_rank_0_vanishes(hosts):
    one_vanishes(hosts, 0)


def host_of_rank_1_vanishes(hosts):
    one_vanishes(hosts, 1)


def half_open(hosts, which):
    """One rank ends unseen, its host forgets the connections, and answers by a reset when the link is mended."""
    timeout = 20  # the reset comes long before
    ranks = training(hosts, timeout=timeout)
    host = "ab"[which]
    begin = time.monotonic()
    hosts.forget_ended_connections(host)
    hosts.cut()
    ranks[which].vanish()
    if not wait_until(lambda: not hosts.connections(host), 10):
        raise AssertionError(f"host {host} still has connections: {hosts.connections(host)}")
    hosts.mend()
    expected = without_the_other_host(ranks)[ranks[1 - which]] + ["Connection reset by peer"]
    expect_failure(timeout - 1, begin, {ranks[1 - which]: expected})


def half_open_to_rank_0(hosts):
    half_open(hosts, 0)


def half_open_to_rank_1(hosts):
    half_open(hosts, 1)


def link_cut_while_ranks_come(hosts):
    timeout = 20
    ranks = [Rank(hosts, host, rank, world=3, timeout=timeout) for rank, host in enumerate("ab")]
    if not wait_until(lambda: hosts.connected_to_store("b"), 60):
        raise AssertionError("rank 1 does not connect to the store")
    wait_until(lambda: False, 1)
    hosts.cut()
    refused = "process group 'world' of ranks 0, 1, 2 can not be made"
    expect_failure(timeout + GRACE, ranks[1].begin, {
        ranks[0]: [refused, "rank 2 has not come within 20 s"],
        ranks[1]: [refused, "The host of the rank that serves it, as a rule rank 0, or the link to it is down"]})


def slow_link(hosts):
    """Works, in no less time than the bytes take."""
    steps, bits_per_second = 20, 256_000
    shard = (64 * 64 + 64) * 4 // 2  # bytes that each rank sends at least twice a step: gathered, reduced
    least = 8 * (steps * 2 * shard - 2048) / bits_per_second
    hosts.slow_down(bits_per_second, queue_seconds=4)
    ranks = [Rank(hosts, host, rank, steps=steps, timeout=60) for rank, host in enumerate("ab")]
    for rank in ranks:
        rank.await_text("met the others\n")
    begin = time.monotonic()
    expect_success(ranks, limit=60)
    took = time.monotonic() - begin
    print(f"  trained for {took:.1f} s; the bytes alone take {least:.1f} s")
    if took < least:
        raise AssertionError("the link was not slow")


def link_slower_than_the_timeout(hosts):
    """8 KiB in 16 s, where an operation may take 4 s: neither rank is dead, and each is told of the other."""
    ranks = training(hosts)
    begin = time.monotonic()
    hosts.slow_down(4_000, queue_seconds=120)
    expect_failure(TIMEOUT + GRACE, begin, without_the_other_host(ranks))


def names_that_are_loopback(hosts, loopback="127.0.1.1"):
    hosts.resolve_own_names_to(loopback)
    expect_success([Rank(hosts, host, rank, steps=3, master="node-a") for rank, host in enumerate("ab")])


def names_that_are_loopback_of_ipv6(hosts):
    names_that_are_loopback(hosts, "::1")


def loopback_interface(hosts):
    ranks = [Rank(hosts, "a", 0, timeout=60), Rank(hosts, "b", 1, timeout=60, GLOO_SOCKET_IFNAME="lo")]
    told = ["rank 1: GLOO_SOCKET_IFNAME names 'lo'", "eth0 10.77.0.2"]
    expect_failure(40, ranks[0].begin, {rank: told for rank in ranks})


def silent_port(hosts):
    with tempfile.TemporaryFile() as output:
        silence = (f"import socket, time; s = socket.create_server(('', {PORT})); print('listens', flush=True); "
                   "time.sleep(1000)")
        listener = hosts.start("a", [sys.executable, "-c", silence], os.environ, output)
        if not wait_until(lambda: os.fstat(output.fileno()).st_size > 0, 30):
            raise AssertionError("nothing listens")
        rank = Rank(hosts, "b", 1)
        expect_failure(TIMEOUT + GRACE, rank.begin, {rank: [
            f"rank 1 .* connected to MASTER_ADDR={ADDRESS['a']}, MASTER_PORT={PORT}",
            "what listens there has said nothing"]})
        listener.kill()
        listener.wait()


def dropped_packets(hosts):
    hosts.drop_what_a_sends()
    ranks = [Rank(hosts, host, rank) for rank, host in enumerate("ab")]
    expect_failure(TIMEOUT + GRACE, ranks[0].begin, {
        ranks[0]: ["process group 'world' of ranks 0, 1 can not be made", "rank 1 has not come within"],
        ranks[1]: [f"rank 1 .* can not reach rank 0 at MASTER_ADDR={ADDRESS['a']}, MASTER_PORT={PORT}", "a firewall"]})


def host_that_is_down(hosts):
    rank = Rank(hosts, "b", 1, master=NOBODY)
    expect_failure(TIMEOUT + GRACE, rank.begin, {rank: [f"rank 1 .* can not reach rank 0 at MASTER_ADDR={NOBODY}"]})


def name_server_that_is_down(hosts):
    hosts.give_nobody_a_name_server("b")
    rank = Rank(hosts, "b", 1, master="node-a.example.org")
    expect_failure(TIMEOUT + GRACE, rank.begin, {rank: ["rank 1 .* can not resolve MASTER_ADDR=node-a.example.org"]})


def a_world_after_a_failed_one(hosts):
    """On the same port."""
    ranks = training(hosts)
    begin = time.monotonic()
    ranks[1].vanish()
    expect_failure(TIMEOUT + GRACE, begin, {ranks[0]: without_the_other_host(ranks)[ranks[0]]})
    expect_success([Rank(hosts, host, rank, steps=3) for rank, host in enumerate("ab")])


class Driver:
    """This program once more, with other arguments."""

    def __init__(self, *cases, **variables):
        self.file = tempfile.NamedTemporaryFile("w+")
        self.process = subprocess.Popen([sys.executable, __file__, sys.argv[1], *cases], stdout=self.file,
                                        stderr=subprocess.STDOUT, env={**os.environ, **variables},
                                        start_new_session=True)
        self.prefix = own_prefix(self.process.pid)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()

    def output(self):
        return pathlib.Path(self.file.name).read_text()

    def ended(self):
        return self.process.poll() is not None

    def await_ranks(self, case):
        """Their process ids, as soon as one runs on each host."""
        pids = {}

        def run():
            if f"{case} (" not in self.output():  # before, it tries whether networks can be made, and removes them
                return False
            with contextlib.suppress(subprocess.CalledProcessError):  # of a namespace that is half made
                pids.update((name, processes_in(name)) for name in namespaces(self.prefix)
                            if name.endswith(("-a", "-b")))
            return len(pids) == len(ADDRESS) and all(pids.values())

        if not wait_until(lambda: run() or self.ended(), 60) or self.ended():
            raise AssertionError(f"no ranks were started:\n{self.output()}")
        return sum(pids.values(), [])

    def expect_end(self, code, *texts):
        """With nothing left."""
        wait_until(self.ended, 60)
        if self.process.poll() != code:
            raise AssertionError(f"exit code {self.process.returncode}, not {code}:\n{self.output()}")
        for text in texts:
            if text not in self.output():
                raise AssertionError(f"it does not say '{text}':\n{self.output()}")
        left = namespaces(self.prefix) + configurations(self.prefix)
        if left:
            raise AssertionError(f"it left: {', '.join(left)}")


def signals_leave_nothing(_):
    for number in SIGNALS:
        with Driver("link_cut") as driver:
            pids = driver.await_ranks("link_cut")
            driver.process.send_signal(number)
            driver.expect_end(128 + number, f"ended by {number.name}")
        running = [pid for pid in pids if pathlib.Path(f"/proc/{pid}").exists()]
        if running:
            raise AssertionError(f"{number.name} left running: {running}")
        print(f"  {number.name}: {len(pids)} processes ended, nothing left")


def a_failing_command_leaves_nothing(_):
    with tempfile.TemporaryDirectory() as folder:
        command = pathlib.Path(folder) / "tc"
        command.write_text("#!/bin/sh\necho no such queue >&2\nexit 2\n")
        command.chmod(0o755)
        with Driver("link_slower_than_the_timeout", PATH=f"{folder}:{os.environ['PATH']}") as driver:
            driver.expect_end(1, "failed: link_slower_than_the_timeout", "no such queue")


def odd_calls_are_refused(_):
    with Driver("link_cutt") as driver:
        driver.expect_end(2, "no case 'link_cutt'", "link_cut_while_ranks_come")
    with Driver("link_cut", PATH="/nowhere") as driver:
        driver.expect_end(3, "SKIPPED")


CASES = [link_cut, link_cut_between_two_ranks_each, host_of_rank_0_vanishes, host_of_rank_1_vanishes,
         half_open_to_rank_0, half_open_to_rank_1, link_cut_while_ranks_come, slow_link, link_slower_than_the_timeout,
         names_that_are_loopback, names_that_are_loopback_of_ipv6, loopback_interface, silent_port, dropped_packets,
         host_that_is_down, name_server_that_is_down, a_world_after_a_failed_one, signals_leave_nothing,
         a_failing_command_leaves_nothing, odd_calls_are_refused]


def faults_of(case):
    faults = []
    hosts = TwoHosts()
    try:
        hosts.plug_in()
        case(hosts)
        running = hosts.running()
        faults += [f"still running: {running}"] * bool(running)
    except AssertionError as error:
        faults.append(str(error))
    except subprocess.CalledProcessError as error:
        faults.append(f"{' '.join(error.cmd)}: {error.stderr.strip()}")
    finally:
        faults += hosts.remove()
        for fault in faults:
            print(f"  NOT AS IT SHOULD BE: {fault}", flush=True)
    return faults


def chosen_cases(names):
    known = {case.__name__: case for case in CASES}
    for name in names:
        if name not in known:
            raise LookupError(f"no case '{name}'; there are: {', '.join(known)}")
    return [known[name] for name in names] or CASES


def main():
    if len(sys.argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        cases = chosen_cases(sys.argv[2:])
    except LookupError as error:
        print(error.args[0], file=sys.stderr)
        return 2
    Signals.listen()
    if not may_make_networks():
        print("SKIPPED: no case was run, since network namespaces need root and iproute2 (ip, tc)")
        return 3
    failed = []
    try:
        for case in cases:
            Signals.check()
            print(f"{case.__name__} (timeout {TIMEOUT} s)", flush=True)
            if faults_of(case):
                failed.append(case.__name__)
        Signals.check()
    except Interrupted as error:
        print(error)
        return 128 + error.number
    print(f"failed: {', '.join(failed)}" if failed else f"all as they should be: {len(cases)} cases")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
