"""Times sharded steps in C++ and in Python, each right after a plain one, with nothing sent: the host time that a unit costs.

The process believes to be rank 0 of a fake world, so a step's time is that of one thread: what the sharded step takes beyond
the plain one before it, over the number of units, is what sharding costs the host per unit and step. Optimizers included. A
program's figure is the median over its pairs of steps; a cell is the median over rounds, with the smallest and largest. A round
runs both one after the other, and ratios are formed within it.
"""

import argparse
import json
import os
import pathlib
import subprocess

from compare_step_times import spread

FOLDER = pathlib.Path(__file__).resolve().parent
UNITS_BESIDE_BLOCKS = 2  # the embedding and the head; the root's norm is a unit of its own too, but counted as theirs


def microseconds_per_unit(program, units, options):
    """Of one run of `program`, in which plain and sharded steps take turns: what sharding costs, and the plain step."""
    flags = [f"--blocks={units - UNITS_BESIDE_BLOCKS}", f"--width={options.width}", f"--tokens={options.tokens}", "--batch=1",
             f"--warmup={options.warmup}", f"--steps={options.steps}", "--backend=fake",
             "--implementation=beside_plain"]  # fmt: skip
    place = {"WORLD_SIZE": str(options.world), "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    environment = {**os.environ, **place, "OMP_NUM_THREADS": "1"}
    output = subprocess.run(program + flags, env=environment, stdout=subprocess.PIPE, text=True, timeout=600, check=True).stdout
    result = json.loads(output.strip().splitlines()[-1])
    sharding = result["median_seconds_beyond_plain"]
    return sharding / units * 1e6, (result["median_seconds"] - sharding) / units * 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--binary", required=True, help="the program step_time")
    parser.add_argument("--python", required=True, help="an interpreter that has torch, for FSDP2")
    parser.add_argument("--units", default="6,18,66", help="how many, separated by commas")
    parser.add_argument("--world", type=int, default=8, help="ranks of the fake world")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=5, help="steps before the clock starts")
    parser.add_argument("--steps", type=int, default=40, help="steps timed per round")
    options = parser.parse_args()
    print(f"host time per unit and step, microseconds: rank 0 of a fake world of {options.world}, one thread; "
          f"median (min..max) of {options.rounds} rounds")  # fmt: skip
    print(f"{'units':>6} {'sharded':>24} {'FSDP2':>28} {'FSDP2 / sharded':>24}")
    for units in map(int, options.units.split(",")):
        ours, theirs = [], []
        for _ in range(options.rounds):
            ours.append(microseconds_per_unit([options.binary], units, options)[0])
            theirs.append(microseconds_per_unit([options.python, str(FOLDER / "fsdp2_step_time.py")], units, options)[0])
        ratios = [b / a for a, b in zip(ours, theirs)]
        print(f"{units:>6} {spread(ours, 1, 0):>24} {spread(theirs, 1, 0):>28} {spread(ratios, 1, 1):>24}", flush=True)


if __name__ == "__main__":
    main()
