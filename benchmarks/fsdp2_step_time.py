"""Times training steps (forward, backward, AdamW or Muon with it) of the example's transformer under Python's FSDP2, with --tp on dp x tp.

The model, its weights, the texts, the units, the optimizer and the output are those of step_time.cc. One process is one rank, as RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT say; `run` and `host_cost` start them. "beside_plain" has a plain step before each of FSDP2's.
"""

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

HEADS, KV_HEADS, VOCAB = 4, 2, 256


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        kv_width = width // HEADS * KV_HEADS
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, kv_width, bias=False)
        self.value = nn.Linear(width, kv_width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x, cos, sin):
        batch, tokens, width = x.shape

        def split(y):  # as many heads as this rank has
            return y.view(batch, tokens, -1, width // HEADS).transpose(1, 2)

        def share(y):
            return y.repeat_interleave(HEADS // KV_HEADS, 1)

        q = rotate(split(self.query(x)), cos, sin)
        k = share(rotate(split(self.key(x)), cos, sin))
        v = share(split(self.value(x)))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


class SwiGlu(nn.Module):
    def __init__(self, width):
        super().__init__()
        hidden = (width * 8 // 3 + 15) // 16 * 16
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, eps=1e-5)
        self.attention = Attention(width)
        self.mlp_norm = nn.RMSNorm(width, eps=1e-5)
        self.mlp = SwiGlu(width)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    def __init__(self, width, blocks, tokens):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, VOCAB, bias=False)
        head_width = width // HEADS
        frequency = 10000.0 ** (torch.arange(0, head_width, 2) / -head_width)
        angle = torch.outer(torch.arange(tokens).float(), frequency)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())
        self.set_start_weights()

    @torch.no_grad()
    def set_start_weights(self):
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            phase = sum(map(ord, name.replace("blocks.", "block")))
            place = torch.arange(parameter.numel(), dtype=torch.double)
            parameter.copy_((place * 0.7 + phase).sin().mul(0.03).view_as(parameter))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


def flags():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--implementation", choices=("fsdp2", "beside_plain"), default="fsdp2")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--backend", choices=("gloo", "nccl", "fake"), default="gloo", help="fake: nothing is sent")
    parser.add_argument("--param_dtype", choices=("f32", "bf16"), default="f32", help="bf16: sums of gradients in f32")
    parser.add_argument("--no_optimizer", action="store_true", help="steps are forward and backward alone")
    parser.add_argument("--muon", choices=("none", "rows", "owners"), default="none", help="not none: Muon of the blocks' matrices")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--sequence_parallel", action="store_true")
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--steps", type=int, default=50)
    return parser.parse_args()


def start(backend):
    if backend != "fake":
        dist.init_process_group(backend)
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    place = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    dist.init_process_group("fake", store=FakeStore(), **place)


def parallelize(model, mesh, sequence_parallel):
    """Tensor parallelism as PyTorch's tutorials do it."""
    between = Shard(1) if sequence_parallel else Replicate()
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    for name in (f"blocks.{i}" for i in range(len(model.blocks))):
        columns = (f"{name}.attention.query", f"{name}.attention.key", f"{name}.attention.value")
        columns += f"{name}.mlp.gate", f"{name}.mlp.up"
        plan |= {column: ColwiseParallel() for column in columns}
        plan |= {row: RowwiseParallel(output_layouts=between) for row in (f"{name}.attention.output", f"{name}.mlp.down")}
        if sequence_parallel:
            whole = (Replicate(), None, None)
            plan[f"{name}.attention"] = PrepareModuleInput(input_layouts=(Shard(1), None, None), desired_input_layouts=whole)
            plan[f"{name}.mlp"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
            plan |= {f"{name}.attention_norm": SequenceParallel(), f"{name}.mlp_norm": SequenceParallel()}
    if sequence_parallel:
        plan["norm"] = SequenceParallel()
    parallelize_module(model, mesh, plan)


def shard(model, mesh, param_dtype):
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    settings = {"mesh": mesh} | ({"mp_policy": mixed} if param_dtype == "bf16" else {})
    fully_shard(model.embedding, **settings)
    for block in model.blocks:
        fully_shard(block, **settings)
    fully_shard(model.head, **settings)
    fully_shard(model, **settings)


def text_of(data_rank, batch, tokens):
    rows, places = torch.arange(batch).unsqueeze(1), torch.arange(tokens + 1)
    return (rows * 131 + places * places * 7 + data_rank * 29) % 251


def bytes_sent():
    """By this machine so far, over all interfaces."""
    lines = pathlib.Path("/proc/net/dev").read_text().splitlines()
    return sum(int(line.split(":")[1].split()[8]) for line in lines if ":" in line)


def make_optimizers(model, muon):
    """As in step_time.cc."""
    if muon == "none":
        return [torch.optim.AdamW(model.parameters(), lr=3e-4, eps=1e-3)]
    named = dict(model.named_parameters())
    matrices = [name for name, parameter in named.items() if parameter.dim() == 2 and name.startswith("blocks.")]
    others = [parameter for name, parameter in named.items() if name not in matrices]
    return [torch.optim.Muon([named[name] for name in matrices], lr=1e-3), torch.optim.AdamW(others, lr=3e-4, eps=1e-3)]


def make_step(model, inputs, targets, muon, cut_logits=False, optimizes=True):
    """Returns a function that makes one training step and returns its seconds and its loss."""
    optimizers = make_optimizers(model, muon)

    def wait_for_device():
        if inputs.is_cuda:
            torch.cuda.synchronize()

    def step():
        wait_for_device()
        begin = time.perf_counter()
        for optimizer in optimizers:
            optimizer.zero_grad()
        with loss_parallel() if cut_logits else contextlib.nullcontext():
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
        for optimizer in optimizers if optimizes else ():
            optimizer.step()
        wait_for_device()
        seconds = time.perf_counter() - begin
        return seconds, loss.full_tensor().item() if cut_logits else loss.item()

    return step


def main():
    options = flags()
    torch.set_num_threads(1)
    start(options.backend)
    size = (options.width, options.blocks, options.tokens)
    mesh = init_device_mesh(options.device, (dist.get_world_size() // options.tp, options.tp), mesh_dim_names=("dp", "tp"))
    text = text_of(mesh["dp"].get_local_rank(), options.batch, options.tokens)
    data = tuple(part.contiguous().to(options.device) for part in (text[:, :-1], text[:, 1:]))
    model = Transformer(*size).to(options.device)
    if options.tp > 1:
        parallelize(model, mesh["tp"], options.sequence_parallel)
    shard(model, mesh["dp"], options.param_dtype)
    optimizes = not options.no_optimizer
    step = make_step(model, *data, options.muon, cut_logits=options.tp > 1, optimizes=optimizes)
    plain_step = None
    if options.implementation == "beside_plain":
        plain_step = make_step(Transformer(*size).to(options.device), *data, options.muon, optimizes=optimizes)

    seconds, beyond_plain, losses, sent_before = [], [], [], 0
    for i in range(-options.warmup, options.steps):
        if i == 0:
            sent_before = bytes_sent()
        of_plain = plain_step()[0] if plain_step else 0
        of_step, loss = step()
        losses.append(loss)
        if i >= 0:
            seconds.append(of_step)
            beyond_plain.append(of_step - of_plain)
    sent = (bytes_sent() - sent_before) // options.steps
    if dist.get_rank() == 0:
        result = {"implementation": options.implementation, "median_seconds": statistics.median(seconds)}
        result |= {"bytes_sent": sent, "losses": losses}
        if plain_step:
            result["median_seconds_beyond_plain"] = statistics.median(beyond_plain)
        print(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
