"""Steps of torch.optim.Muon and of this library's Muon, on the same parameters and gradients.

Usage: compare_muon.py PROGRAM

PROGRAM is built from muon_steps.cc. Prints a row per case, and exits 1 where a parameter or a momentum differs by more than
1e-5 of the largest element after 20 steps.
"""

import math
import pathlib
import subprocess
import sys
import tempfile

import torch

STEPS = 20
SHAPES = [(1, 9), (9, 1), (16, 16), (7, 33), (33, 7), (64, 48), (48, 64), (96, 24)]
TOLERANCE = 1e-5
CASES = {
    "defaults": {},
    "without_nesterov": {"lr": 2e-2, "nesterov": False},
    "match_rms": {"lr": 1e-3, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.01},
    "match_rms_without_nesterov": {"lr": 1e-3, "adjust_lr_fn": "match_rms_adamw", "nesterov": False, "momentum": 0.8},
    "other_iteration": {"lr": 2e-2, "ns_steps": 3, "ns_coefficients": (3.0, -3.2, 1.2), "eps": 1e-3},
}


def values_of(shape, seed):
    """The same in muon_steps.cc."""
    place = torch.arange(math.prod(shape), dtype=torch.float64)
    return (place * 0.7 + seed).sin().to(torch.float32).view(shape)


def steps_of(options):
    """Parameters and momenta afterwards."""
    params = [torch.nn.Parameter(values_of(shape, float(i))) for i, shape in enumerate(SHAPES)]
    muon = torch.optim.Muon(params, **options)
    for step in range(STEPS):
        for i, (param, shape) in enumerate(zip(params, SHAPES)):
            param.grad = values_of(shape, 100.0 + i + 10.0 * step)
        muon.step()
    return [(param.detach(), muon.state[param]["momentum_buffer"]) for param in params]


def difference(ours, theirs):
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def main():
    if not hasattr(torch.optim, "Muon"):
        sys.exit(f"compare_muon: torch {torch.__version__} has no torch.optim.Muon")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "ours"
        subprocess.run([sys.argv[1], path], check=True)
        ours = torch.load(path, weights_only=False)
    faults = 0
    for case, options in CASES.items():
        worst, equal = 0.0, 0
        for i, pair in enumerate(steps_of(options)):
            for mine, theirs in zip((ours[f"{case}/{i}"], ours[f"{case}/{i}/momentum_buffer"]), pair):
                worst = max(worst, difference(mine, theirs))
                equal += torch.equal(mine, theirs)
        agrees = worst <= TOLERANCE
        faults += not agrees
        print(f"{case:<28} {equal:>2} of {2 * len(SHAPES)} bit-equal, others by at most {worst:.1e}  "
              f"{'agree' if agrees else 'DISAGREE'}")  # fmt: skip
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
