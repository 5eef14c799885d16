"""Measures all that is said about speed in one run, and writes it to results.md and results.json.

Implementations of one case run in turn, several rounds. A cell is the median over rounds of the median step, with the smallest
and largest round; ratios are formed within a round. The first losses of all implementations are compared.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time

import compare_host_costs
import link
from compare_step_times import COMPARED_LOSSES, FOLDER, run_ranks, spread

STEP_BY_STEP = "sharded / plain, step by step"
SIZE = "width × blocks × tokens"
BITS = {"0.3 Gbit/s": 3 * 10**8, "1 Gbit/s": 10**9, "3 Gbit/s": 3 * 10**9}
# By name: the program and the setting of peer memory.
IMPLEMENTATIONS = {
    "plain": ("plain", "on"),
    "sharded": ("sharded", "on"),
    "sharded, copies": ("sharded", "copy"),
    "sharded, Gloo": ("sharded", "off"),
    "FSDP2": ("fsdp2", "on"),
}
COLUMNS = tuple(IMPLEMENTATIONS)
# Each step after one of a plain model in the same process: a machine that is slower for a second is so for both.
BESIDE_PLAIN = "sharded beside plain"
IMPLEMENTATIONS[BESIDE_PLAIN] = ("beside_plain", "on")
COMPARED = ("plain", "sharded", "FSDP2")
PARTS = ("one_host", "tensor_parallel", "muon", "host_cost", "over_links")  # methods of Report


class Case:
    """One row of a table: implementations that do the same work."""

    def __init__(self, size, rounds, steps, ranks=2, implementations=tuple(IMPLEMENTATIONS), flags=()):
        self.size, self.rounds, self.steps, self.ranks = size, rounds, steps, ranks
        self.implementations, self.flags = implementations, list(flags)

    def program(self, name, options):
        width, blocks, tokens = self.size.split("x")
        kind = IMPLEMENTATIONS[name][0]
        begin = [options.python, str(FOLDER / "fsdp2_step_time.py")] if kind == "fsdp2" else [options.binary, f"--implementation={kind}"]
        flags = [flag for flag in self.flags if kind != "plain" or flag.startswith("--muon")]
        return [*begin, f"--width={width}", f"--blocks={blocks}", f"--tokens={tokens}", "--batch=2",
                f"--warmup={max(2, self.steps // 4)}", f"--steps={self.steps}", *flags]  # fmt: skip

    def measure(self, options, run=None):
        """By implementation, what each round printed."""
        run = run or (lambda program, name: run_ranks(program, self.ranks, {"FSDP_PEER_MEMORY": IMPLEMENTATIONS[name][1]}))
        results = {name: [] for name in self.implementations}
        rounds = max(1, round(self.rounds * options.effort))
        for done in range(rounds):
            print(f"[benchmarks] {self.size}, {self.ranks} ranks: round {done + 1} of {rounds}", file=sys.stderr, flush=True)
            for name in self.implementations:
                results[name].append(run(self.program(name, options), name))
        return results


def one_host_cases():
    yield Case("64x4x32", 7, 100)
    yield Case("256x8x128", 3, 16)
    yield Case("512x12x256", 2, 3)
    yield Case("768x14x128", 2, 3)  # 100 M parameters


def tensor_parallel_cases():
    for ranks in (2, 4):
        for size, rounds, steps in (("64x4x32", 3, 30), ("256x8x128", 2, 10)):
            for flags in (["--tp=2"], ["--tp=2", "--sequence_parallel"]):
                yield Case(size, rounds, steps, ranks, (*COMPARED, BESIDE_PLAIN), flags)


def muon_cases():
    for ranks in (2, 4):
        for size, rounds, steps in (("64x4x32", 3, 30), ("256x8x128", 2, 6)):
            for matrices in ("rows", "owners"):
                yield Case(size, rounds, steps, ranks, (*COMPARED, BESIDE_PLAIN), [f"--muon={matrices}"])


def seconds(rounds):
    return [each["median_seconds"] for each in rounds]


def ratio(results, above, below):
    return spread([a / b for a, b in zip(seconds(results[above]), seconds(results[below]))], 1, 2)


def ratio_step_by_step(results):
    """Of sharded steps and the plain one before each."""
    rounds = [(each["median_seconds"], each["median_seconds_beyond_plain"]) for each in results[BESIDE_PLAIN]]
    return spread([step / (step - beyond) for step, beyond in rounds], 1, 2)


def milliseconds(rounds):
    return spread(seconds(rounds), 1e3, 1) + " ms"


def largest_difference(results):
    """Relative, of the first losses of what is sharded; plain ranks see other data."""
    losses = [rounds[0]["losses"][:COMPARED_LOSSES] for name, rounds in results.items() if name != "plain"]
    return max(abs(one - other) / abs(other) for some in losses for one, other in zip(some, losses[0]))


def table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def named(size):
    return size.replace("x", " × ")


class Report:
    def __init__(self, options):
        self.options, self.parts, self.raw = options, [], {}
        self.noise = [noise()]

    def add(self, title, head, rows):
        self.parts.append(f"## {title}\n\n{table(head, rows)}\n")
        self.noise.append(noise())
        print(self.parts[-1], flush=True)

    def one_host(self):
        rows = []
        for case in one_host_cases():
            results = self.raw[f"one host, {case.size}"] = case.measure(self.options)
            rows.append([named(case.size), *(milliseconds(results[name]) for name in COLUMNS),
                         ratio_step_by_step(results), ratio(results, "sharded", "plain"), ratio(results, "sharded, copies", "plain"),
                         ratio(results, "sharded, Gloo", "plain"), ratio(results, "sharded", "FSDP2"),
                         f"{largest_difference(results):.0e}"])  # fmt: skip
        self.add("2 ranks of one host", [SIZE, *COLUMNS, STEP_BY_STEP, "sharded / plain", "copies / plain", "Gloo / plain",
                                         "sharded / FSDP2", "losses differ by"], rows)  # fmt: skip

    def tensor_parallel(self):
        rows = []
        for case in tensor_parallel_cases():
            cut = "tensor and sequence" if len(case.flags) > 1 else "tensor"
            results = self.raw[f"tp, {case.ranks} ranks, {case.size}, {cut}"] = case.measure(self.options)
            rows.append([f"{case.ranks // 2} × 2", named(case.size), cut, *(milliseconds(results[name]) for name in COMPARED),
                         ratio_step_by_step(results), ratio(results, "sharded", "plain"), ratio(results, "sharded", "FSDP2"),
                         f"{largest_difference(results):.0e}"])  # fmt: skip
        self.add("Tensor parallelism, dp × tp ranks of one host", ["dp × tp", SIZE, "cut", *COMPARED, STEP_BY_STEP, "sharded / plain",
                                                                    "sharded / PyTorch", "losses differ by"], rows)  # fmt: skip

    def muon(self):
        rows = []
        for case in muon_cases():
            matrices = case.flags[0].partition("=")[2]
            results = self.raw[f"muon, {case.ranks} ranks, {case.size}, {matrices}"] = case.measure(self.options)
            rows.append([case.ranks, named(case.size), matrices, *(milliseconds(results[name]) for name in COMPARED),
                         ratio_step_by_step(results), ratio(results, "sharded", "plain"), ratio(results, "sharded", "FSDP2")])  # fmt: skip
        self.add("Muon with AdamW, ranks of one host; FSDP2 with torch.optim.Muon on its DTensors",
                 ["ranks", SIZE, "matrices in", *COMPARED, STEP_BY_STEP, "sharded / plain", "sharded / FSDP2"], rows)  # fmt: skip

    def host_cost(self):
        options = argparse.Namespace(width=16, tokens=4, warmup=5, steps=40, world=8)
        rows = []
        for units in (6, 18, 66, 130):
            rounds = range(max(1, round(3 * self.options.effort)))
            costs = [compare_host_costs.microseconds_per_unit([self.options.binary], units, options) for _ in rounds]
            self.raw[f"host cost, {units} units"] = costs
            sharding, plain = zip(*costs)
            rows.append([units, spread(sharding, 1, 0) + " µs", spread(plain, 1, 0) + " µs"])
        self.add("Host time per unit and step, nothing sent (a fake world of 8)", ["units", "of sharding", "of the plain step"], rows)

    def over_links(self):
        if not link.may_make_networks():
            self.parts.append("## Over a link between two hosts\n\nNot measured: it needs root and iproute2.\n")
            return
        rows = []
        for name, bits in BITS.items():
            case = Case("256x8x128", 2, 8, implementations=COMPARED)
            results = self.raw[f"link, {name}"] = case.measure(self.options, lambda program, _, bits=bits: link.run_over_link(program, bits))
            rows.append([name, *(milliseconds(results[each]) for each in COMPARED),
                         *(spread(over_the_larger(results, each, bits), 1, 2) for each in COMPARED[1:])])  # fmt: skip
        self.add("Over a link between two hosts, 256 × 8 × 128, one rank each",
                 ["rate", *COMPARED, "sharded / max(compute, wire)", "FSDP2 / max(compute, wire)"], rows)  # fmt: skip

    def write(self):
        machine = f"{cpu_model()}, {os.cpu_count()} CPUs, {platform.system()} {platform.release()}"
        head = (f"# Measured\n\nBy `benchmarks/run --all`, {datetime.date.today()}, on {machine}; torch {torch_version(self.options.python)}. "
                "Median step (forward, backward, AdamW) of the example's transformer, batch 2 and one thread per rank; cells are the median "
                "(smallest..largest) of rounds in which the implementations take turns, and ratios are formed within a round. "
                f"How noisy the machine was: before and after each table a loop of one thread took {noise_in_words(self.noise)}.\n")
        (FOLDER / "results.md").write_text("\n".join([head, *self.parts]), encoding="utf-8")
        (FOLDER / "results.json").write_text(json.dumps({"machine": machine, "measured": self.raw}, indent=1), encoding="utf-8")


def noise(repeats=15):
    """Seconds that the same work takes, again and again, while nothing is measured."""
    taken = []
    for _ in range(repeats):
        begin = time.perf_counter()
        sum(range(2_000_000))
        taken.append(time.perf_counter() - begin)
    return taken


def noise_in_words(samples):
    """By their median: the largest within one look at the machine, and the medians of all looks."""
    all_of_them = statistics.median(sum(samples, []))
    largest = max(max(each) / statistics.median(each) for each in samples)
    medians = [statistics.median(each) / all_of_them for each in samples]
    return f"{spread(medians, 1, 2)} times its usual time, and up to {largest:.2f} times that of its neighbours"


def over_the_larger(results, name, bits):
    """Of the time that it computes, as the plain model does, and the time that what it sends is on the wire."""
    wire = [8 * each["bytes_sent"] / bits for each in results[name]]
    return [step / max(compute, sent) for step, compute, sent in zip(seconds(results[name]), seconds(results["plain"]), wire)]


def cpu_model():
    lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def torch_version(python):
    return subprocess.run([python, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True, check=True).stdout.strip()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--binary", required=True, help="the program step_time")
    parser.add_argument("--python", required=True, help="an interpreter that has torch, for FSDP2")
    parser.add_argument("--effort", type=float, default=1, help="times as many rounds; 1 takes half an hour")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="of the report")
    options = parser.parse_args()
    report = Report(options)
    for done, part in enumerate(options.parts):
        print(f"[benchmarks] {part}, part {done + 1} of {len(options.parts)}", file=sys.stderr, flush=True)
        getattr(report, part)()
    report.write()


if __name__ == "__main__":
    main()
