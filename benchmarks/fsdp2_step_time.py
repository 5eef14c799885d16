"""Times training steps (forward, backward, AdamW) of the example's transformer under Python's FSDP2.

The model, the units, the optimizer and the output are those of step_time.cc. One process is one rank, as RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT say; `run` and `host_cost` start them. "beside_plain" has a plain step before each of FSDP2's.
"""

import argparse
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

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

        def split(y, heads):
            return y.view(batch, tokens, heads, width // HEADS).transpose(1, 2)

        def share(y):
            return y.repeat_interleave(HEADS // KV_HEADS, 1)

        q = rotate(split(self.query(x), HEADS), cos, sin)
        k = share(rotate(split(self.key(x), KV_HEADS), cos, sin))
        v = share(split(self.value(x), KV_HEADS))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(mixed.transpose(1, 2).reshape(batch, tokens, width))


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
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


def flags():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--implementation", choices=("fsdp2", "beside_plain"), default="fsdp2")
    parser.add_argument("--backend", choices=("gloo", "fake"), default="gloo", help="fake: nothing is sent")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--steps", type=int, default=50)
    return parser.parse_args()


def start(backend):
    if backend == "gloo":
        dist.init_process_group("gloo")
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    place = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    dist.init_process_group("fake", store=FakeStore(), **place)


def shard(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.embedding, mesh=mesh)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model.head, mesh=mesh)
    fully_shard(model, mesh=mesh)


def make_step(model, inputs, targets):
    """Returns a function that makes one training step and returns its seconds."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def step():
        begin = time.perf_counter()
        optimizer.zero_grad()
        F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        return time.perf_counter() - begin

    return step


def main():
    options = flags()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    start(options.backend)
    size = (options.width, options.blocks, options.tokens)
    text = torch.randint(VOCAB, (options.batch, options.tokens + 1))
    data = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    model = Transformer(*size)
    shard(model)
    step = make_step(model, *data)
    plain_step = make_step(Transformer(*size), *data) if options.implementation == "beside_plain" else None

    seconds, beyond_plain = [], []
    for i in range(-options.warmup, options.steps):
        of_plain = plain_step() if plain_step else 0
        of_step = step()
        if i >= 0:
            seconds.append(of_step)
            beyond_plain.append(of_step - of_plain)
    if dist.get_rank() == 0:
        result = {"implementation": options.implementation, "median_seconds": statistics.median(seconds)}
        if plain_step:
            result["median_seconds_beyond_plain"] = statistics.median(beyond_plain)
        print(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
