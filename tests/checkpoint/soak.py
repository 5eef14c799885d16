#!/usr/bin/env python3
"""Kills a training at random moments and resumes it, many times, and compares it with one that was left alone.

    tests/checkpoint/soak.py --kills 50 [--mixed]

Needs a built //programs/trainer:train_transformer. Killed are one rank, all ranks, or the launcher. With as many ranks as before
every time, the last checkpoint must be equal byte by byte; with --mixed each resumption has 1 to 4 ranks, and the losses
must agree up to rounding. Nothing but the kept checkpoints may be left in the folder.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

PROGRAM = "bazel-bin/programs/trainer/train_transformer"
GLOBAL_BATCH = 12  # sequences; 1 to 4 ranks divide it
RANKS = 3
KEPT = 2
TOLERANCE = 2e-3


def start(folder, ranks, steps):
    command = [PROGRAM, f"--ranks={ranks}", f"--batch={GLOBAL_BATCH // ranks}", f"--steps={steps}"]
    command += ["--width=32", "--blocks=2", "--heads=2", "--kv_heads=1", "--tokens=32", "--generate=0"]
    command += ["--validate_every=0", f"--checkpoint={folder}", "--save_every=3", "--resume"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def children_of(pid):
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    return [int(child) for child in found.stdout.split()]


def kill(process, how):
    ranks = children_of(process.pid)
    victims = {"one rank": ranks[:1] and [random.choice(ranks)], "all ranks": ranks, "launcher": [process.pid]}[how]
    for pid in victims or [process.pid]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def losses_of(output):
    return {int(step): float(loss) for step, loss in re.findall(r"step +(\d+)/\d+  loss ([\d.]+)", output)}


def run_to_end(folder, ranks, options):
    process = start(folder, ranks, options.steps)
    output, _ = process.communicate()
    if process.returncode != 0:
        sys.exit(f"the training failed:\n{output}")
    return output


def run_disturbed(folder, options, typical_seconds):
    losses, resumed, kills = {}, 0, 0
    while kills < options.kills:
        ranks = random.randint(1, 4) if options.mixed else RANKS
        # One step less than the last training, whose save then always follows theirs: what they left is its to remove.
        process = start(folder, ranks, options.steps - 1)
        try:
            output, _ = process.communicate(timeout=random.uniform(0.3, 1.2) * typical_seconds)
            if process.returncode != 0:
                sys.exit(f"the training failed by itself:\n{output}")
            steps = sorted(name for name in os.listdir(folder) if name.startswith("step-"))
            for name in steps:  # it came to its end: take it back to the beginning
                subprocess.run(["rm", "-r", f"{folder}/{name}"], check=True)
        except subprocess.TimeoutExpired:
            kill(process, random.choice(["one rank", "all ranks", "launcher"]))
            kills += 1
            output, _ = process.communicate()
            time.sleep(0.2)  # orphaned ranks end by themselves
        resumed += "resumed after step" in output
        for step, loss in losses_of(output).items():
            losses.setdefault(step, []).append(loss)
    return losses, resumed


def checksums(folder, options):
    with open(f"{folder}/step-{options.steps:08d}/checkpoint.json") as file:
        manifest = json.load(file)
    return {name: file["xxh3"] for name, file in manifest["files"].items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mixed", action="store_true")
    options = parser.parse_args()
    random.seed(options.seed)
    with tempfile.TemporaryDirectory() as root:
        begin = time.monotonic()
        undisturbed = losses_of(run_to_end(f"{root}/alone", RANKS, options))
        typical_seconds = time.monotonic() - begin
        os.makedirs(f"{root}/killed")
        losses, resumed = run_disturbed(f"{root}/killed", options, typical_seconds)
        run_to_end(f"{root}/killed", RANKS, options)
        worst = max(abs(loss - undisturbed[step]) / undisturbed[step] for step in losses for loss in losses[step])
        litter = [name for name in os.listdir(f"{root}/killed") if not name.startswith("step-")]
        kept = len(os.listdir(f"{root}/killed"))
        equal = checksums(f"{root}/alone", options) == checksums(f"{root}/killed", options)
        print(f"{options.kills} kills, {resumed} resumptions, {sum(map(len, losses.values()))} losses compared:")
        print(f"largest relative difference {worst:.2g}; last checkpoint {'equal' if equal else 'differs'}")
        print(f"{kept} entries are left, of which litter: {litter}")
        good = worst <= TOLERANCE if options.mixed else worst == 0 and equal
        sys.exit(0 if good and not litter and kept <= KEPT else 1)


if __name__ == "__main__":
    main()
