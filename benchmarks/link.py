"""A link of limited rate between two hosts, which are network namespaces, with one rank on each. Needs root and iproute2."""

import json
import os
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests/two_hosts"))
from network import ADDRESS, PORT, TwoHosts, may_make_networks  # noqa: E402

HOSTS = ("a", "b")
QUEUE_SECONDS = 20  # nothing is dropped
BURST_SECONDS = 0.002  # a few ticks of the kernel's clock: with less the link is slower than its rate


def run_over_link(program, bits_per_second, seconds=600):
    """What rank 0 printed as its last line, which is JSON."""
    hosts = TwoHosts()
    try:
        hosts.plug_in()
        hosts.slow_down(bits_per_second, QUEUE_SECONDS, int(bits_per_second / 8 * BURST_SECONDS))
        with tempfile.TemporaryDirectory() as folder:
            outputs = [open(pathlib.Path(folder) / host, "w+", encoding="utf-8") for host in HOSTS]
            ranks = [hosts.start(host, program, environment_of(rank), outputs[rank]) for rank, host in enumerate(HOSTS)]
            ended = [rank.wait(timeout=seconds) for rank in ranks]
            texts = [pathlib.Path(output.name).read_text(encoding="utf-8") for output in outputs]
            for output in outputs:
                output.close()
    finally:
        hosts.remove()
    if any(ended):
        raise SystemExit(f"{' '.join(program)} over a link ended with {ended}:\n" + "\n".join(texts))
    return json.loads([line for line in texts[0].splitlines() if line.startswith("{")][-1])


def environment_of(rank):
    return dict(os.environ, RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR=ADDRESS["a"], MASTER_PORT=str(PORT),
                OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="eth0")  # fmt: skip
