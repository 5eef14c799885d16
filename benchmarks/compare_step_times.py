"""Runs the implementations in turn, several rounds, and prints their step times and ratios.

One round runs plain, sharded (whose ranks share memory), sharded over Gloo and FSDP2 one after the other, so that whatever
else the machine does meets all of them. A cell is the median over rounds of the median step, with the smallest and largest
round; ratios are formed within a round.
"""

import argparse
import json
import os
import pathlib
import socket
import statistics
import subprocess

FOLDER = pathlib.Path(__file__).resolve().parent
OVER_GLOO = "sharded, Gloo"
IMPLEMENTATIONS = ("plain", "sharded", OVER_GLOO, "fsdp2")
PAIRS = (("sharded", "plain"), (OVER_GLOO, "plain"), ("fsdp2", "plain"), ("sharded", "fsdp2"), (OVER_GLOO, "fsdp2"))
COMPARED_LOSSES = 10  # later ones differ by rounding that has grown


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def command(implementation, options):
    if implementation == "fsdp2":
        return [options.python, str(FOLDER / "fsdp2_step_time.py")]
    return [options.binary, "--implementation=" + ("plain" if implementation == "plain" else "sharded")]


def run_ranks(program, ranks, environment=None):
    """Starts one process per rank and returns the JSON line that rank 0 printed."""
    place = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            program,
            env={**os.environ, **place, **(environment or {}), "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, process in enumerate(processes):
        if process.returncode != 0:
            raise SystemExit(f"rank {rank} of {' '.join(program)} ended with {process.returncode}")
    return json.loads(outputs[0].strip().splitlines()[-1])


def measure(size, options):
    """Returns, by implementation, what every round printed."""
    width, blocks, tokens = size.split("x")
    tp = [f"--tp={options.tp}"] + (["--sequence_parallel"] if options.sequence_parallel else [])
    flags = [f"--width={width}", f"--blocks={blocks}", f"--tokens={tokens}", f"--batch={options.batch}",
             f"--warmup={options.warmup}", f"--steps={options.steps}", *tp]  # fmt: skip
    results = {implementation: [] for implementation in IMPLEMENTATIONS}
    for _ in range(options.rounds):
        for implementation in IMPLEMENTATIONS:
            environment = {"FSDP_PEER_MEMORY": "off" if implementation == OVER_GLOO else "on"}
            program = command(implementation, options) + flags
            results[implementation].append(run_ranks(program, options.ranks, environment))
    return results


def spread(values, scale, digits):
    low, middle, high = min(values) * scale, statistics.median(values) * scale, max(values) * scale
    return f"{middle:.{digits}f} ({low:.{digits}f}..{high:.{digits}f})"


def print_table(size, results):
    times = {name: [each["median_seconds"] for each in rounds] for name, rounds in results.items()}
    print(f"\n{size} (width x blocks x tokens)")
    for implementation in IMPLEMENTATIONS:
        print(f"  {implementation:<21} {spread(times[implementation], 1e3, 2):>26} ms")
    for above, below in PAIRS:
        ratios = [a / b for a, b in zip(times[above], times[below])]
        print(f"  {above + ' / ' + below:<21} {spread(ratios, 1, 2):>26}")
    for implementation in (OVER_GLOO, "fsdp2"):
        sent = [result["bytes_sent"] for result in results[implementation]]
        print(f"  {implementation + ' sends':<21} {spread(sent, 2**-20, 3):>26} MiB per step, all ranks")
    losses = {name: rounds[0]["losses"][:COMPARED_LOSSES] for name, rounds in results.items()}
    largest = max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(losses["sharded"], losses["fsdp2"]))
    print(f"  the first losses of sharded and fsdp2 differ by at most {largest:.1e} relative, of sharded over both ways by "
          f"{max(abs(a - b) for a, b in zip(losses['sharded'], losses[OVER_GLOO])):.1e}")  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--binary", required=True, help="the program step_time")
    parser.add_argument("--python", required=True, help="an interpreter that has torch, for FSDP2")
    parser.add_argument("--sizes", default="64x4x32,256x8x128", help="width x blocks x tokens, separated by commas")
    parser.add_argument("--batch", type=int, default=2, help="sequences per rank")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tp", type=int, default=1, help="tensor parallelism: ranks that compute one model together")
    parser.add_argument("--sequence-parallel", action="store_true", help="with --tp: cut activations along the tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=10, help="steps before the clock starts")
    parser.add_argument("--steps", type=int, default=40, help="steps timed per round")
    options = parser.parse_args()
    mesh = f"{options.ranks // options.tp} x {options.tp}" if options.tp > 1 else options.ranks
    print(f"{mesh} ranks of one host, one thread each, batch {options.batch} per rank; median step of {options.steps}, "
          f"median (min..max) of {options.rounds} rounds")  # fmt: skip
    for size in options.sizes.split(","):
        print_table(size, measure(size, options))


if __name__ == "__main__":
    main()
