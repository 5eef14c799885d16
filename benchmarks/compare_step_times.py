"""Runs the three implementations in turn, several rounds, and prints their step times and ratios.

One round runs plain, sharded and FSDP2 one after the other, so that whatever else the machine does meets all three. A cell
is the median over rounds of the median step, with the smallest and largest round; ratios are formed within a round.
"""

import argparse
import json
import os
import pathlib
import socket
import statistics
import subprocess

FOLDER = pathlib.Path(__file__).resolve().parent
IMPLEMENTATIONS = ("plain", "sharded", "fsdp2")
PAIRS = (("sharded", "plain"), ("fsdp2", "plain"), ("sharded", "fsdp2"))


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def command(implementation, options):
    if implementation == "fsdp2":
        return [options.python, str(FOLDER / "fsdp2_step_time.py")]
    return [options.binary, "--implementation=" + implementation]


def run_ranks(program, ranks):
    """Starts one process per rank and returns the JSON line that rank 0 printed."""
    place = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            program,
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
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
    """Returns, by implementation, the median step time in seconds of every round."""
    width, blocks, tokens = size.split("x")
    flags = [f"--width={width}", f"--blocks={blocks}", f"--tokens={tokens}", f"--batch={options.batch}",
             f"--warmup={options.warmup}", f"--steps={options.steps}"]  # fmt: skip
    times = {implementation: [] for implementation in IMPLEMENTATIONS}
    for _ in range(options.rounds):
        for implementation in IMPLEMENTATIONS:
            result = run_ranks(command(implementation, options) + flags, options.ranks)
            times[implementation].append(result["median_seconds"])
    return times


def spread(values, scale, digits):
    low, middle, high = min(values) * scale, statistics.median(values) * scale, max(values) * scale
    return f"{middle:.{digits}f} ({low:.{digits}f}..{high:.{digits}f})"


def print_table(size, times):
    print(f"\n{size} (width x blocks x tokens)")
    for implementation in IMPLEMENTATIONS:
        print(f"  {implementation:<18} {spread(times[implementation], 1e3, 2):>26} ms")
    for above, below in PAIRS:
        ratios = [a / b for a, b in zip(times[above], times[below])]
        print(f"  {above + ' / ' + below:<18} {spread(ratios, 1, 2):>26}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--binary", required=True, help="the program step_time")
    parser.add_argument("--python", required=True, help="an interpreter that has torch, for FSDP2")
    parser.add_argument("--sizes", default="64x4x32,256x8x128", help="width x blocks x tokens, separated by commas")
    parser.add_argument("--batch", type=int, default=2, help="sequences per rank")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=10, help="steps before the clock starts")
    parser.add_argument("--steps", type=int, default=40, help="steps timed per round")
    options = parser.parse_args()
    print(f"{options.ranks} ranks over Gloo, one thread each, batch {options.batch} per rank; median step of {options.steps}, "
          f"median (min..max) of {options.rounds} rounds")  # fmt: skip
    for size in options.sizes.split(","):
        print_table(size, measure(size, options))


if __name__ == "__main__":
    main()
