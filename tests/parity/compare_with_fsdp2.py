"""Trains one model under Python's FSDP2 and under this library, from the same weights on the same data, and compares.

Usage: compare_with_fsdp2.py PROGRAM

PROGRAM is built from parity_rank.cc, which calls the operators that are called here. Each case is a mesh with a policy.
Prints a row per case and exits 1 where the two disagree on any rank:

  first gradients  In a world of two they have the same bits. In a larger one the order of a sum counts: each element is
                   within (W - 1) * eps * sum |g_i| / W, where g_i is what rank i's unsharded model computes and eps that
                   of the dtype in which gradients are reduced.
  losses           The first have the same bits. In ten steps of AdamW they stay within what rounding becomes, which is
                   measured (rounding.py).

Sums of bf16 (bf16_sums) are made in float here and in bf16 by FSDP2. So in a world of two our gradients are compared
after rounding to bf16, and losses may differ by its eps at least. Where reduce_dtype is unset (bf16_unset) gradients are
reduced in the parameters' own dtype, which FSDP2 does from PyTorch 2.15 on, and is told before.
"""

import argparse
import functools
import pathlib
import tempfile
import typing

import ranks
import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from rounding import ADAMW_EPS, bounds_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

STEPS, BATCH, TOKENS = 10, 2, 12
# Two and four ranks have uneven shards, and the last of four has none of what is one per head.
VOCAB, WIDTH, HEADS, HIDDEN, BLOCKS = 53, 18, 3, 45, 2

MESHES = {2: ("2", "2x1", "1x2"), 4: ("4", "2x2")}  # by world


class Policy(typing.NamedTuple):
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None  # of the root


POLICIES = {
    "fp32": Policy(),
    "bf16": Policy(torch.bfloat16, torch.float32, torch.float32),
    "bf16_unset": Policy(torch.bfloat16, None, torch.float32),
    "bf16_sums": Policy(torch.bfloat16, torch.bfloat16, torch.float32),
}

CASES = {world: [f"{mesh}-{policy}" for mesh in meshes for policy in POLICIES] for world, meshes in MESHES.items()}


def sum_dtype(policy):
    return policy.reduce_dtype or torch.float32


def mesh_and_policy(case):
    mesh, policy = case.split("-")
    return [int(size) for size in mesh.split("x")], POLICIES[policy]


def make_weights():
    """By the names of the parameters."""
    block = {
        "norm_weight": [WIDTH], "norm_bias": [WIDTH], "qkv": [3 * WIDTH, WIDTH], "gain": [HEADS, 1, 1],
        "output": [WIDTH, WIDTH], "output_bias": [WIDTH], "mlp_norm_weight": [WIDTH], "mlp_norm_bias": [WIDTH],
        "up": [HIDDEN, WIDTH], "up_bias": [HIDDEN], "down": [WIDTH, HIDDEN], "down_bias": [WIDTH],
    }  # fmt: skip
    shapes = {f"block{i}.{name}": shape for i in range(BLOCKS) for name, shape in block.items()}
    shapes |= {"embedding": [VOCAB, WIDTH], "norm_weight": [WIDTH], "norm_bias": [WIDTH], "head": [VOCAB, WIDTH]}
    return {
        name: torch.randn(shape) * 0.1 + (1.0 if name.endswith(("norm_weight", "gain")) else 0.0)
        for name, shape in shapes.items()
    }


class Weights(nn.Module):
    """Its parameters are those of `weights` whose names are `prefix` and one word."""

    def __init__(self, weights, prefix):
        super().__init__()
        for name, value in weights.items():
            if name.startswith(prefix) and "." not in name.removeprefix(prefix) and name != "text":
                self.register_parameter(name.removeprefix(prefix), nn.Parameter(value.clone()))


class Block(Weights):
    def attention(self, x):
        def split(y):
            return y.view(x.size(0), x.size(1), HEADS, WIDTH // HEADS).transpose(1, 2)

        q, k, v = F.linear(x, self.qkv).chunk(3, -1)
        scores = torch.matmul(split(q), split(k).transpose(-2, -1)) * (WIDTH // HEADS) ** -0.5
        future = torch.ones(x.size(1), x.size(1), dtype=torch.bool).triu(1)
        weights = torch.softmax(scores.masked_fill(future, -torch.inf), -1)
        mixed = torch.matmul(weights, split(v)) * self.gain
        return F.linear(mixed.transpose(1, 2).reshape(x.shape), self.output, self.output_bias)

    def mlp(self, x):
        return F.linear(F.gelu(F.linear(x, self.up, self.up_bias)), self.down, self.down_bias)

    def forward(self, x):
        x = x + self.attention(F.layer_norm(x, [WIDTH], self.norm_weight, self.norm_bias))
        return x + self.mlp(F.layer_norm(x, [WIDTH], self.mlp_norm_weight, self.mlp_norm_bias))


class Model(Weights):
    def __init__(self, weights):
        super().__init__(weights, "")
        for i in range(BLOCKS):
            self.add_module(f"block{i}", Block(weights, f"block{i}."))

    def forward(self, tokens):
        x = F.embedding(tokens, self.embedding)
        for block in self.children():
            x = block(x)
        return F.linear(F.layer_norm(x, [WIDTH], self.norm_weight, self.norm_bias), self.head)


def loss_of(model, text):
    logits = model(text[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def file_of(folder, case, rank):
    return folder / f"{case}.rank{rank}"


def train_sharded(case, data, rank):
    """Returns the losses, and the first step's gradients by name."""
    shape, policy = mesh_and_policy(case)
    mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=("replicate", "shard")[-len(shape) :])
    model = Model(data)
    dtypes = {"param_dtype": policy.param_dtype, "reduce_dtype": policy.reduce_dtype}
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15):
        dtypes["reduce_dtype"] = sum_dtype(policy)  # unset was param_dtype
    for block in model.children():
        fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(**dtypes))
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(**dtypes, output_dtype=policy.output_dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=ADAMW_EPS, foreach=True)
    losses, gradients = [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, data["text"][step, rank])
        loss.backward()
        if step == 0:
            gradients = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
    return {"losses": torch.tensor(losses, dtype=torch.float64), **gradients}


def unsharded_backward(policy, weights, text):
    """The loss, and its gradients by name, as they are reduced."""
    model = Model(weights).to(policy.param_dtype or torch.float32)
    loss = loss_of(lambda tokens: model(tokens).float(), text)
    loss.backward()
    gradients = {name: parameter.grad.to(sum_dtype(policy)).float() for name, parameter in model.named_parameters()}
    return loss.detach(), gradients


def train_unsharded(world, policy, data, change):
    """The losses by step and rank."""
    model = Model(data)
    change(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=ADAMW_EPS, foreach=True)
    losses = torch.empty(STEPS, world)
    for step in range(STEPS):
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        terms = []
        for rank in range(world):
            losses[step, rank], gradients = unsharded_backward(policy, weights, data["text"][step, rank])
            terms.append(gradients)
        for name, parameter in model.named_parameters():
            parameter.grad = (sum(term[name] for term in terms) / world).to(sum_dtype(policy)).float()
        optimizer.step()
    return {"losses": losses}


def run_fsdp2_rank(rank, world, data, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{world}", rank=rank, world_size=world)
    for case in CASES[world]:
        torch.save(train_sharded(case, data, rank), file_of(folder, case, rank))
    dist.destroy_process_group()


def run_fsdp2(world, data, folder):
    # Forked: importing torch takes seconds.
    torch.multiprocessing.start_processes(run_fsdp2_rank, (world, data, folder), world, start_method="fork")


def run_program(program, world, data_file, folder):
    command = [program, str(data_file), str(folder), *CASES[world]]
    statuses, _ = ranks.run_ranks(command, world)
    if any(statuses):
        raise SystemExit(f"the ranks of {' '.join(command)} ended with {statuses}")


class Difference(typing.NamedTuple):
    elements: int  # of gradients, that differ
    of_bound: float  # the largest of gradients, in parts of its bound
    of_first_loss: float
    of_losses: float


def difference_of_gradients(ours, theirs, terms, dtype):
    """Of one parameter: how many elements differ, and the largest difference in parts of its bound."""
    world = len(terms)
    if world == 2:
        ours = ours.to(dtype).float()
    bound = (world - 1) * torch.finfo(dtype).eps * sum(term.abs() for term in terms) / world
    difference = (ours - theirs).abs()
    differs = difference != 0
    of_bound = torch.where(differs, difference / bound, 0.0).nan_to_num(nan=torch.inf)
    return differs.sum().item(), of_bound.max().item()


def compare(ours, theirs, terms, dtype):
    """`terms`: what the gradients are the means of, by rank."""
    of_losses = (ours.pop("losses") - theirs.pop("losses")).abs()
    assert ours.keys() == theirs.keys(), f"the gradients are those of {ours.keys()}"
    differences = [
        difference_of_gradients(ours[name], theirs[name], [term[name] for term in terms], dtype) for name in theirs
    ]
    elements, of_bound = zip(*differences)
    return Difference(sum(elements), max(of_bound), of_losses[0].item(), of_losses.max().item())


def agrees(difference, world, bound):
    gradients_agree = difference.elements == 0 if world == 2 else difference.of_bound <= 1
    return gradients_agree and difference.of_first_loss == 0 and difference.of_losses <= bound


def bound_of_losses(world, policy, data):
    rounded = bounds_of(functools.partial(train_unsharded, world, policy, data))["losses"]
    return max(rounded, torch.finfo(torch.bfloat16).eps) if sum_dtype(policy) == torch.bfloat16 else rounded


def compare_case(world, case, data, folder, bound):
    """Prints a row, that of the worst rank in each column, and returns whether all ranks agree."""
    mesh, policy = case.split("-")
    dtype = sum_dtype(POLICIES[policy])
    terms = [unsharded_backward(POLICIES[policy], data, data["text"][0, rank])[1] for rank in range(world)]
    differences = []
    for rank in range(world):
        theirs = torch.load(file_of(folder, case, rank))
        ours = torch.load(file_of(folder / "ours", case, rank), weights_only=False)  # it has type tags
        differences.append(compare(ours, theirs, terms, dtype))
    all_agree = all(agrees(difference, world, bound) for difference in differences)
    elements, of_bound, _, of_losses = (max(column) for column in zip(*differences))
    verdict = "agree" if all_agree else "DISAGREE"
    losses = f"{of_losses:>9.1e} of {bound:.1e}"
    print(f"{world:>5} {mesh:>5}  {policy:<9} {elements:>9} {of_bound:>16.3f} {losses}  {verdict}")
    return all_agree


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", metavar="PROGRAM")
    program = parser.parse_args().program
    torch.set_num_threads(1)
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "ours").mkdir()
        weights = make_weights()
        data = {"text": torch.randint(VOCAB, (STEPS, max(CASES), BATCH, TOKENS + 1)), **weights}
        torch.save(data, folder / "data")
        for world in CASES:
            run_fsdp2(world, data, folder)
            run_program(program, world, folder / "data", folder / "ours")
        elements = sum(weight.numel() for weight in weights.values())
        print(f"Differences of the {elements} elements of the first gradients, and of the losses:")
        print("world  mesh  policy    different  |dg| / its bound losses by")
        bounds = {(world, name): bound_of_losses(world, POLICIES[name], data) for world in CASES for name in POLICIES}
        verdicts = [
            compare_case(world, case, data, folder, bounds[world, case.split("-")[1]])
            for world, cases in CASES.items()
            for case in cases
        ]
    if not all(verdicts):
        raise SystemExit("this library and FSDP2 disagree")


if __name__ == "__main__":
    main()
