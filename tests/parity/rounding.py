"""How far rounding takes a computation. Two programs that add up in another order, and two CPUs, round differently."""

import torch

# Values are rounded in several places on their way through a program.
ROUNDINGS = 4
DRAWS = 8

# AdamW divides a gradient by its size and this. With the default, 1e-8, what rounding leaves of no gradient is a whole step.
ADAMW_EPS = 1e-4


def largest(difference):
    return difference.abs().max().item()


def move(parameters, seed):
    """Each element by one unit in its last place, up or down."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters:
            up = torch.rand(parameter.shape, generator=generator) < 0.5
            parameter.copy_(torch.nextafter(parameter, torch.where(up, torch.inf, -torch.inf)))


def bounds_of(results):
    """By how much the tensors of a dict may differ: ROUNDINGS times what they differ by where parameters are moved by one unit in
    the last place. `results(change)` computes them, from parameters that it calls change(parameters) with first."""
    exact = results(lambda parameters: None)
    # What does not move is rounded all the same.
    bounds = {name: torch.finfo(value.dtype).eps * largest(value) for name, value in exact.items()}
    for seed in range(DRAWS):
        for name, value in results(lambda parameters, seed=seed: move(parameters, seed)).items():
            bounds[name] = max(bounds[name], largest(value - exact[name]))
    return {name: ROUNDINGS * bound for name, bound in bounds.items()}
