"""Shows the library on one GPU, step by step, and writes a report that is whole after every step.

Runs in the folder that tools/test_gpu unpacked, on a machine with a driver and a python3 whose torch is of the bundle's version; no network,
compiler or Bazel. With `--device cpu` the same steps run on the CPU, which shows that they run at all.

    python3 run_bundle.py                   # everything, most telling first; report.md
    python3 run_bundle.py --only facts one_rank
"""

import argparse
import dataclasses
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent


@dataclasses.dataclass
class Result:
    name: str
    status: str  # passed, failed, not run
    seconds: float = 0.0
    text: str = ""  # Markdown
    detail: str = ""  # the end of what a failed step printed


class Machine:
    """Runs programs of the bundle beside the torch of this python3."""

    def __init__(self, device, deadline):
        import torch

        self.device, self.deadline, self.torch = device, deadline, torch
        libraries = [HERE / "lib", pathlib.Path(torch.__file__).parent / "lib"]
        libraries += sorted(pathlib.Path(torch.__file__).parents[1].glob("nvidia/*/lib"))
        self.environment = os.environ | {
            "LD_LIBRARY_PATH": ":".join(map(str, libraries)),
            "FSDP_TEST_DEVICE": device,
            "CUDA_MODULE_LOADING": "LAZY",
        }

    def left(self):
        return self.deadline - time.monotonic()

    def run(self, command, limit, **environment):
        """The exit status, or None at the time limit, and what was printed."""
        limit = max(1.0, min(limit, self.left()))
        try:
            done = subprocess.run(
                [str(part) for part in command],
                cwd=HERE,
                env=self.environment | environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=limit,
            )
            return done.returncode, done.stdout
        except subprocess.TimeoutExpired as expired:
            printed = expired.stdout or b""
            return None, printed.decode(errors="replace") if isinstance(printed, bytes) else printed


def facts(machine):
    torch, wanted = machine.torch, (HERE / "torch_version").read_text().strip()
    lines = [f"LibTorch {torch.__version__}, CUDA {torch.version.cuda}; built against {wanted}"]
    if machine.device == "cuda":
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            lines.append(f"cuda:{index}: {properties.name}, {properties.total_memory >> 20} MiB, capability {properties.major}.{properties.minor}")
        lines.append("NCCL " + ".".join(map(str, torch.cuda.nccl.version())))
    status, printed = machine.run(["ldd", HERE / "gpu_test"], 30)
    missing = re.findall(r"(\S+) => not found", printed)
    lines += [f"missing: {name}" for name in missing]
    fits = torch.__version__.split("+")[0] == wanted.split("+")[0] and not missing and status == 0
    return fits, "\n".join(f"- {line}" for line in lines), printed


def tests(pattern, limit):
    """A step: tests of gpu_test whose names match."""

    def run(machine):
        status, printed = machine.run([HERE / "gpu_test", f"--gtest_filter={pattern}", "--gtest_brief=0"], limit)
        ends = ("OK", "SKIPPED", "FAILED")
        counts = {end: len(re.findall(rf"^\[ *{end} *\] .* \(\d+ ms\)$", printed, re.M)) for end in ends}
        names = sorted(set(re.findall(r"^\[  FAILED  \] ([^\s,]+)", printed, re.M)))
        lines = [", ".join(f"{count} {end.lower()}" for end, count in counts.items()) + ("" if status is not None else "; stopped at its time limit")]
        lines += [f"- failed: {name}" for name in names if "." in name]
        lines += [f"- {figure}" for figure in re.findall(r"^FIGURE (.*?) *$", printed, re.M)]
        return status == 0, "\n".join(lines), printed

    return run


SMALL = ("--width=64", "--blocks=4", "--tokens=32", "--batch=2")
MIDDLE = ("--width=512", "--blocks=8", "--tokens=256", "--batch=4")
LARGE = ("--width=2048", "--blocks=8", "--tokens=1024", "--batch=4")


@dataclasses.dataclass
class Race:
    """Training steps of one model, plain and on rank 0 of a fake world of 8, by step_time and by its counterpart for Python's FSDP2."""

    size: tuple  # flags of step_time
    dtype: str = "f32"
    optimizes: bool = False
    steps: int = 30

    RANKS = {"plain": 1, "sharded": 8, "fsdp2": 8}

    def title(self):
        width, blocks, tokens, batch = (flag.split("=")[1] for flag in self.size)
        model = f"{blocks} blocks of width {width}, {batch} x {tokens} tokens"
        return f"{model} | {self.dtype} | {'with AdamW' if self.optimizes else 'forward, backward'}"

    def run(self, machine, implementation, limit):
        """The median of the steps' seconds, or None, and what was printed."""
        flags = [*self.size, f"--device={machine.device}", f"--param_dtype={self.dtype}", "--warmup=5", f"--steps={self.steps}", "--backend=fake"]
        if implementation == "fsdp2":
            command = [sys.executable, HERE / "fsdp2_step_time.py", *flags] + ([] if self.optimizes else ["--no_optimizer"])
        else:
            command = [HERE / "step_time", f"--implementation={implementation}", *flags] + ([] if self.optimizes else ["--nooptimizer"])
        status, printed = machine.run(command, limit, RANK="0", WORLD_SIZE=str(self.RANKS[implementation]), LOCAL_RANK="0")
        found = re.findall(r"^\{.*\}$", printed, re.M)
        return (json.loads(found[-1])["median_seconds"] if status == 0 and found else None), printed


RACES = {
    "cuda": [
        Race(MIDDLE),
        Race(LARGE, dtype="bf16"),
        Race(MIDDLE, dtype="bf16"),
    ],
    "cpu": [Race(SMALL, steps=5, optimizes=True)],
}


def row_of(race, times):
    plain, sharded, fsdp2 = (f"{statistics.median(seconds) * 1e3:.2f} ms" for seconds in times.values())
    ratios = [a / b for a, b in zip(times["sharded"], times["fsdp2"])]
    ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})"
    return f"| {race.title()} | {plain} | {sharded} | {fsdp2} | {ratio} |"


def speed(rounds, limit):
    """A step: races in turns."""

    def run(machine):
        lines = ["| model | dtype | step | plain | sharded, 8 ranks | FSDP2, 8 ranks | sharded / FSDP2 |", "|---|---|---|---|---|---|---|"]
        for race in RACES[machine.device]:
            times = {implementation: [] for implementation in Race.RANKS}
            for _ in range(rounds):
                for implementation, seconds in times.items():
                    found, printed = race.run(machine, implementation, limit)
                    if found is None:
                        return False, "\n".join(lines), f"{implementation}, {race.title()}:\n{printed}"
                    seconds.append(found)
            lines.append(row_of(race, times))
        return True, "\n".join(lines), ""

    return run


def sanitizer(machine):
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if machine.device != "cuda" or tool is None:
        return None, "There is no compute-sanitizer here.", ""
    pattern = "--gtest_filter=*FakeWorlds.*/EightRanks:*FakeWorlds.*/Hybrid:*FakeWorlds.*/Offloaded:*FakeWorldsOnTwoStreams.*/SecondUseOnTheSide"
    status, printed = machine.run([tool, "--tool=memcheck", "--error-exitcode=9", HERE / "gpu_test", pattern], 120)
    found = re.findall(r"ERROR SUMMARY: (.*)", printed)
    ran = len(re.findall(r"^\[ +OK \]", printed, re.M))
    return status == 0 and ran > 0, f"memcheck of {ran} tests: {found[-1] if found else 'no summary'}", printed


STEPS = {
    "facts": facts,
    "one_rank": tests("OneRankOnCuda.*", 120),
    "fake_worlds": tests("*FakeWorlds*", 180),
    "steps": tests("*GpuSteps*:GpuLaunches.*:GpuMemory.*", 120),
    "two_ranks": tests("TwoRanks.*", 240),
    "sanitizer": sanitizer,
    "speed": speed(rounds=2, limit=60),
}


def write_report(path, results, device):
    lines = ["# The library on " + ("a GPU" if device == "cuda" else "the CPU, in the steps of a GPU's report"), ""]
    if device != "cuda":
        lines += ["NOT SHOWN ON CUDA.", ""]
    lines += ["| step | result | seconds |", "|---|---|---|"]
    lines += [f"| {each.name} | {each.status} | {each.seconds:.0f} |" for each in results]
    for each in results:
        lines += ["", f"## {each.name}: {each.status}", "", each.text]
        if each.detail:
            lines += ["", "```", each.detail[-6000:], "```"]
    path.write_text("\n".join(lines) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, default=10, help="after which no step begins and the running one is stopped")
    parser.add_argument("--report", type=pathlib.Path, default=HERE / "report.md")
    parser.add_argument("--only", nargs="*", choices=STEPS, default=list(STEPS))
    options = parser.parse_args()
    machine = Machine(options.device, time.monotonic() + 60 * options.minutes)
    if options.device == "cuda" and not machine.torch.cuda.is_available():
        print("NOT SHOWN ON CUDA: this machine's torch finds no GPU")
        return 0
    results = [Result(name, "not run") for name in options.only]
    for result in results:
        if machine.left() < 10:
            break
        begin = time.monotonic()
        ends_well, result.text, printed = STEPS[result.name](machine)
        result.seconds = time.monotonic() - begin
        result.status = {True: "passed", False: "failed", None: "not run"}[ends_well]
        result.detail = printed if ends_well is False else ""
        write_report(options.report, results, options.device)
        print(f"{result.name}: {result.status}, {result.seconds:.0f} s", flush=True)
    return 1 if any(each.status == "failed" for each in results) else 0


if __name__ == "__main__":
    sys.exit(main())
