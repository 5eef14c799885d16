"""Two hosts as network namespaces with a switch between them, and the processes that run there.

    hosts = TwoHosts()
    try:
        hosts.plug_in()
        process = hosts.start("a", ["rank", "4", "10"], dict(os.environ), output)
        hosts.cut()
    finally:
        faults = hosts.remove()   # sentences; empty when nothing is left

Needs root and iproute2. What a process there sees as /dev/shm and TMPDIR are folders of its host's own, so that what it
leaves in them is seen.
"""
import contextlib
import itertools
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time

PORT = 29500
ADDRESS = {"a": "10.77.0.1", "b": "10.77.0.2"}
NOBODY = "10.77.0.9"
OTHER = {"a": "b", "b": "a"}
CONFIGURATION = pathlib.Path("/etc/netns")  # `ip netns exec` binds what is in NAME/ there over /etc
SERIAL = itertools.count()


def own_prefix(pid):
    """Of the names of all namespaces that driver `pid` makes."""
    return f"fsdp-{pid}-"


def run(*words):
    """Its output. In a session of its own: a terminal's Ctrl-C is for the driver, which then cleans up."""
    return subprocess.run(words, check=True, capture_output=True, text=True, start_new_session=True).stdout


def namespaces(prefix):
    names = (line.split()[0] for line in run("ip", "netns", "list").splitlines() if line.strip())
    return [name for name in names if name.startswith(prefix)]


def configurations(prefix):
    return [str(path) for path in CONFIGURATION.glob(prefix + "*")]


def processes_in(name):
    return [int(pid) for pid in run("ip", "netns", "pids", name).split()]


def may_make_networks():
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        return False
    hosts = TwoHosts()
    try:
        hosts.plug_in()
    except (OSError, subprocess.CalledProcessError):
        return False
    finally:
        hosts.remove()
    return True


class TwoHosts:
    def __init__(self):
        self.prefix = f"{own_prefix(os.getpid())}{next(SERIAL)}-"
        self.names = {host: self.prefix + host for host in ("a", "b", "switch")}
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix=self.prefix))
        self.started = []

    def ip(self, host, *words):
        run("ip", "-n", self.names[host], *words)

    def plug_in(self):
        for host, name in self.names.items():
            run("ip", "netns", "add", name)
            self.ip(host, "link", "set", "lo", "up")
        self.ip("switch", "link", "add", "name", "sw0", "type", "bridge")
        self.ip("switch", "link", "set", "sw0", "up")
        for host, address in ADDRESS.items():
            run("ip", "link", "add", "eth0", "netns", self.names[host], "type", "veth", "peer", "name", f"to_{host}",
                "netns", self.names["switch"])
            self.ip("switch", "link", "set", f"to_{host}", "up", "master", "sw0")
            self.ip(host, "addr", "add", f"{address}/24", "dev", "eth0")
            self.ip(host, "link", "set", "eth0", "up")
            (CONFIGURATION / self.names[host]).mkdir(parents=True)
            for kind in ("shm", "tmp"):
                (self.folder / host / kind).mkdir(parents=True)

    def start(self, host, words, environment, output):
        own = self.folder / host
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.names[host], "sh", "-c", 'mount --bind "$0" /dev/shm && exec "$@"',
             own / "shm", *words],
            env=dict(environment, TMPDIR=str(own / "tmp")), stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True)
        self.started.append(process)
        return process

    def running(self):
        return sorted(pid for name in namespaces(self.prefix) for pid in processes_in(name))

    def remove(self):
        """All of it, with all that runs there. What could not be removed, and what processes left, in sentences."""
        for process in self.started:
            process.kill()  # does nothing to one that has been waited for
            process.wait()
        self._kill_strays()
        faults = [f"left in {folder}: {', '.join(left)}" for folder, left in self._files_left()]
        shutil.rmtree(self.folder)
        for name in namespaces(self.prefix):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        for folder in configurations(self.prefix):
            shutil.rmtree(folder)
        with contextlib.suppress(OSError):
            CONFIGURATION.rmdir()  # unless others have something there
        kept = namespaces(self.prefix) + configurations(self.prefix)
        return faults + [f"could not be removed: {', '.join(kept)}"] * bool(kept)

    def _kill_strays(self, limit=10):
        """What the processes that were started have started."""
        end = time.monotonic() + limit
        while (left := self.running()) and time.monotonic() < end:
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.02)

    def _files_left(self):
        for folder, what in (("shm", "/dev/shm"), ("tmp", "TMPDIR")):
            left = [path.name for host in ADDRESS for path in (self.folder / host / folder).glob("*")]
            if left:
                yield what, left

    def cut(self):
        """Both keep their carrier, and hear nothing of each other."""
        self.ip("switch", "link", "set", "to_b", "nomaster")

    def mend(self):
        self.ip("switch", "link", "set", "to_b", "master", "sw0")

    def slow_down(self, bits_per_second, queue_seconds, burst_bytes=2000):
        """What each host sends, as many bytes at once; a queue that drops nothing for so long."""
        for host in ADDRESS:
            run("tc", "-n", self.names[host], "qdisc", "add", "dev", "eth0", "root", "tbf", "rate",
                f"{bits_per_second}bit", "burst", str(burst_bytes), "latency", f"{queue_seconds}s")

    def drop_what_a_sends(self):
        """As a firewall does that drops packets without a word: b hears nothing of host a, a hears b."""
        self.ip("a", "route", "add", "blackhole", f"{ADDRESS['b']}/32")

    def give_nobody_a_name_server(self, host):
        """Names are asked of an address that takes packets and never answers."""
        self.ip(host, "neigh", "replace", NOBODY, "lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud", "permanent")
        (CONFIGURATION / self.names[host] / "resolv.conf").write_text(f"nameserver {NOBODY}\n")

    def resolve_own_names_to(self, loopback):
        """127.0.1.1 is what Debian's installer gives a host's own name."""
        for host, other in OTHER.items():
            (CONFIGURATION / self.names[host] / "hosts").write_text(
                "127.0.0.1 localhost\n::1 localhost\n"
                f"{loopback} {os.uname().nodename} node-{host}\n{ADDRESS[other]} node-{other}\n")

    def forget_ended_connections(self, host):
        """After one unanswered try, not after minutes: as a host does that has been started anew."""
        run("ip", "netns", "exec", self.names[host], "sh", "-c", "echo 1 > /proc/sys/net/ipv4/tcp_orphan_retries")

    def connections(self, host):
        """With the other host, in whatever state, as lines of /proc/net/tcp."""
        other = "".join(f"{int(part):02X}" for part in reversed(ADDRESS[OTHER[host]].split(".")))
        table = run("ip", "netns", "exec", self.names[host], "cat", "/proc/net/tcp", "/proc/net/tcp6").splitlines()
        return [line for line in table if f"{other}:" in line.split()[2]]

    def connected_to_store(self, host):
        return any(f"{PORT:04X} 01 " in line for line in self.connections(host))
