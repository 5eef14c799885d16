"""Takes tiny models of Hugging Face's transformers through this library and back, and compares with transformers and FSDP2.

Usage: compare_with_transformers.py PROGRAM

PROGRAM is built from hugging_face_rank.cc. A family is a folder that save_pretrained wrote of a model with random weights.
For each of them, at worlds of 1 and 2 and on dp 2 x tp 2:

  logits     of the first inputs are those of transformers
  documents  in the first inputs, with positions and attention of their own: their logits as well
  gradients  of the first step are those of the model under Python's fully_shard in a world of 2, or alone
  losses     of ten steps of AdamW as well
  export     opened by from_pretrained: the parameters have the bits of ours, and the config is as it was; it finds the
             tokens the likeliest that we generate, which we have with a cache and it has without one
  adapters   opened by peft: beside the base, and merged into it, it has our logits after training
  4 bits     adapters beside a base of NF4 codes have the losses of peft beside what the codes say
  refusals   folders of other models, by the field that says so

What rounding of transformers' model becomes is measured (rounding.py), and values may differ by that.

Prints a row per family and mesh, differences in parts of their bounds, and exits 1 where one disagrees.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from functools import partial

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}

import peft
import ranks
import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
import transformers
from rounding import ADAMW_EPS, bounds_of, largest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS, ROWS, TOKENS, VOCAB, GENERATED = 10, 4, 12, 61, 8

SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
LLAMA_3_SCALING = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip


def rotation(theta, scaling=None):
    """Of this version of transformers."""
    if int(transformers.__version__.split(".")[0]) >= 5:
        return {"rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": theta}}
    return {"rope_theta": theta, "rope_scaling": scaling}


FAMILIES = {
    "llama2": transformers.LlamaConfig(**SIZES | {"num_key_value_heads": 4}, **rotation(10000.0)),
    "llama3": transformers.LlamaConfig(**SIZES, rms_norm_eps=1e-5, **rotation(500000.0, LLAMA_3_SCALING)),
    "mistral": transformers.MistralConfig(**SIZES, sliding_window=32, head_dim=12, **rotation(10000.0)),
    "qwen2": transformers.Qwen2Config(**SIZES, **rotation(1000000.0)),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=10, **rotation(1000000.0)),
    "smollm": transformers.LlamaConfig(**SIZES, tie_word_embeddings=True, **rotation(10000.0)),
}

EXPERTS = {
    "mixtral": transformers.MixtralConfig(
        **SIZES, num_local_experts=5, num_experts_per_tok=2, sliding_window=None, **rotation(10000.0)
    ),
    "qwen3moe": transformers.Qwen3MoeConfig(
        **SIZES, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=20, norm_topk_prob=True, head_dim=10,
        **rotation(10000.0)
    ),
}  # fmt: skip
FAMILIES |= EXPERTS

# Name of a mesh: ranks, how many of them compute one model together, and how many have a block's experts together.
MESHES = {"1": (1, 1, 1), "2": (2, 1, 1), "2x2": (4, 2, 1), "2 ep": (2, 1, 2), "2x2 ep": (4, 1, 2)}

# What is changed in the llama3 folder's config.json, and what the error names.
REFUSALS = {
    "gpt2": ({"model_type": "gpt2"}, 'model_type is "gpt2", allowed are llama, mistral, mixtral, qwen2, qwen3 and qwen3_moe'),
    "classifier": ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
    "biases": ({"attention_bias": True}, "attention_bias is true, allowed is false"),
    "activation": ({"hidden_act": "gelu"}, 'hidden_act is "gelu", allowed is "silu"'),
    "scaling": ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, 'rope_type is "yarn", allowed are default and llama3'),
    "unknown": ({"logit_scale": 0.5}, "field 'logit_scale' (0.5) is not known"),
    "odd_heads": ({"num_key_value_heads": 3}, "kv_heads must divide heads"),
    "string": ({"hidden_size": "32"}, "field 'hidden_size' is \"32\", which is of another type"),
}  # fmt: skip


def make_model(config):
    """With biases and norms that are not all 0 and 1."""
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def loss_of(model, text):
    logits = model(text[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def logits_of_documents(model, inputs, begins):
    """With positions and a mask that say where documents begin, which transformers takes as they are."""
    place = torch.arange(TOKENS)
    start = torch.cummax(begins * place, 1).values
    attends = (start[:, :, None] == start[:, None, :]) & (place[:, None] >= place)
    mask = torch.zeros(attends.shape).masked_fill(~attends, torch.finfo(torch.float32).min)
    return model(inputs, attention_mask=mask[:, None], position_ids=place - start).logits


def train(model, rows_of_step):
    """Ten steps. Returns the losses and the first step's gradients; of a sharded model, this rank's losses and shards."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=ADAMW_EPS)
    losses, gradients = [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, rows_of_step[step])
        loss.backward()
        if step == 0:
            gradients = {f"gradient of {name}": parameter.grad.clone() for name, parameter in model.named_parameters()}
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), gradients


def results_of(folder, text, begins, change):
    """All that is compared within bounds, of one process."""
    model = open_model(folder)
    change(model.parameters())
    with torch.no_grad():
        logits = {
            "logits": model(text[0, :, :-1]).logits,
            "logits of documents": logits_of_documents(model, text[0, :, :-1], begins),
        }
    losses, gradients = train(model, text)
    return {**logits, "losses": losses, **gradients}


def open_model(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def train_alone(folder, text, family):
    """A mixture of experts, whose ranks use different ones: FSDP2 reduces on each rank what it used, and Gloo aborts."""
    losses, gradients = train(open_model(folder / family), text)
    torch.save({"losses": losses.double(), **gradients}, folder / f"{family}.fsdp2")


def train_under_fsdp2(rank, world, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    text = torch.load(folder / "tokens")["text"]
    rows = ROWS // world
    for family in FAMILIES:
        if family in EXPERTS:
            if rank == 0:
                train_alone(folder, text, family)
            continue
        model = open_model(folder / family)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        losses, shards = train(model, text[:, rank * rows : (rank + 1) * rows])
        gradients = {name: shard.full_tensor() for name, shard in shards.items()}
        losses = losses.double()
        dist.all_reduce(losses)
        if rank == 0:
            torch.save({"losses": losses / world, **gradients}, folder / f"{family}.fsdp2")
    dist.destroy_process_group()


def families_of(tp, ep):
    """Experts are not cut by tensor parallelism."""
    return EXPERTS if ep > 1 else {name: each for name, each in FAMILIES.items() if tp == 1 or name not in EXPERTS}


def run_program(program, world, tp, ep, folder, out, families):
    """Returns what went to stderr, and whether all ranks succeeded."""
    command = [program, str(folder), str(out), str(tp), str(ep), *families]
    statuses, errors = ranks.run_ranks(command, world, subprocess.PIPE)
    return errors, not any(statuses)


def shortfall(model, generated, prompt):
    """By how much the logits of tokens that follow the prompt are below the largest."""
    if generated.shape != (len(prompt) + GENERATED,) or not torch.equal(generated[: len(prompt)], prompt):
        return torch.inf
    with torch.no_grad():
        logits = model(generated[None, :-1]).logits[0, len(prompt) - 1 :]
    return largest(logits.max(-1).values - logits.gather(-1, generated[len(prompt) :, None])[:, 0])


def compare(family, folder, out, bounds):
    """Yields what is compared and by how much it differs in parts of its bound, at most 1 where it agrees."""
    ours = torch.load(out / f"{family}.results", weights_only=False)  # it has type tags
    text, begins = torch.load(folder / "tokens").values()
    theirs = torch.load(folder / f"{family}.fsdp2")
    with torch.no_grad():
        model = open_model(folder / family)
        theirs["logits"] = model(text[0, :, :-1]).logits
        theirs["logits of documents"] = logits_of_documents(model, text[0, :, :-1], begins)
    if largest(ours["logits of documents"] - ours["logits"]) < 0.01:
        raise SystemExit(f"{family}: documents make no difference")
    parts = {what: largest(ours[what] - value) / bounds[what] for what, value in theirs.items()}
    yield "logits", parts["logits"]
    yield "documents", parts["logits of documents"]
    yield "gradients", max(part for what, part in parts.items() if what.startswith("gradient of "))
    yield "losses", parts["losses"]
    exported = open_model(out / family)
    values = dict(exported.named_parameters())
    yield "parameters", 0.0 if all(torch.equal(value, ours[name]) for name, value in values.items()) else torch.inf
    before, after = (json.loads((place / family / "config.json").read_text()) for place in (folder, out))
    yield "config", 0.0 if before == after else torch.inf
    yield "generated", shortfall(exported, ours["generated"], text[0, 0, :5]) / bounds["logits"]


def compare_all(program, folder):
    text, begins = torch.load(folder / "tokens").values()
    bounds = {family: bounds_of(partial(results_of, folder / family, text, begins)) for family in FAMILIES}
    verdicts = []
    for mesh, (world, tp, ep) in MESHES.items():
        out = folder / f"ours-{mesh}"
        out.mkdir()
        errors, succeeded = run_program(program, world, tp, ep, folder, out, families_of(tp, ep))
        if not succeeded:
            raise SystemExit(f"mesh {mesh}: {errors}")
        for family in families_of(tp, ep):
            parts = dict(compare(family, folder, out, bounds[family]))
            agrees = all(part <= 1 for part in parts.values())
            verdicts.append(agrees)
            columns = "  ".join(f"{what} {part:.2f}" for what, part in parts.items())
            print(f"{family:<8} {mesh:<4} {columns}  {'agree' if agrees else 'DISAGREE'}")
    return verdicts


def compare_adapters(program, folder, ranks, tp):
    out = folder / f"adapters{ranks}x{tp}"
    out.mkdir()
    errors, succeeded = run_program(program, ranks, tp, 1, folder, out, ["llama3+lora"])
    if not succeeded:
        raise SystemExit(f"adapters: {errors}")
    ours = torch.load(out / "llama3+lora.results", weights_only=False)
    inputs = torch.load(folder / "tokens")["text"][0, :, :-1]

    def opened(change=lambda parameters: None):
        model = peft.PeftModel.from_pretrained(open_model(folder / "llama3"), out / "llama3+lora").eval()
        change(model.parameters())
        return model

    with torch.no_grad():
        bound = bounds_of(lambda change: {"logits": opened(change)(inputs).logits})["logits"]
        beside = largest(ours["logits afterwards"] - opened()(inputs).logits) / bound
        merged = largest(ours["logits afterwards"] - opened().merge_and_unload()(inputs).logits) / bound
    trained = largest(ours["logits afterwards"] - ours["logits"]) / bound
    agrees = max(beside, merged) <= 1 < trained
    print(f"adapters      beside {beside:.2f}  merged {merged:.2f}  trained {trained:.2f}  {'agree' if agrees else 'DISAGREE'}")
    return agrees


# The quantiles of NF4 (Dettmers et al., "QLoRA", 2023).
NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip


def decoded(codes, columns):
    """What rows of codes say: two in a byte, a scale for 64 as E4M3, a mean and a step for 256 scales."""
    packed, blocks = (columns + 1) // 2, -(-columns // 64)
    nibbles = torch.stack([codes[:, :packed] >> 4, codes[:, :packed] & 15], -1).flatten(1)[:, :columns]
    distances = codes[:, packed : packed + blocks].contiguous().view(torch.float8_e4m3fn).double()
    mean, step = codes[:, packed + blocks :].contiguous().view(torch.float32).double().unflatten(1, (-1, 2)).unbind(-1)
    of_blocks = [each.repeat_interleave(256, 1)[:, :blocks] for each in (mean, step)]
    scales = (distances * of_blocks[1] + of_blocks[0]).float().clamp(min=0)
    return NF4[nibbles.long()] * scales.repeat_interleave(64, 1)[:, :columns]


def compare_4_bits(program, folder):
    """Adapters beside a base that is stored in 4 bits, and beside what these say."""
    out = folder / "in_4_bits"
    out.mkdir()
    errors, succeeded = run_program(program, 2, 1, 1, folder, out, ["llama3+nf4"])
    if not succeeded:
        raise SystemExit(f"4 bits: {errors}")
    ours = torch.load(out / "llama3+nf4.results", weights_only=False)
    base = open_model(folder / "llama3")
    with torch.no_grad():
        stored = [(name, each) for name, each in base.named_parameters() if each.dim() == 2]
        for name, each in stored:
            if ours[name].dtype != torch.uint8:
                raise SystemExit(f"4 bits: {name} is {ours[name].dtype}")
            each.copy_(decoded(ours[name], each.shape[1]))
        inputs = torch.load(folder / "tokens")["text"]
        model = peft.PeftModel.from_pretrained(base, out / "llama3+nf4", is_trainable=True).eval()
        for name, each in model.named_parameters():
            if each.requires_grad:
                name = name.removeprefix("base_model.model.").replace(".default", "")
                each.copy_(ours[f"start of {name}"])
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3, eps=ADAMW_EPS)
    losses = []
    for step in range(len(ours["losses"])):
        optimizer.zero_grad()
        loss = loss_of(model, inputs[step % len(inputs)])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        logits = largest(ours["logits afterwards"] - model(inputs[0, :, :-1]).logits)
    off = largest(ours["losses"] - torch.tensor(losses, dtype=torch.float64))
    agrees = off <= 1e-5 and logits <= 1e-4 and losses[-len(inputs)] < losses[0]
    print(f"4 bits        losses of {len(losses)} steps by {off:.1e}  logits by {logits:.1e}  {'agree' if agrees else 'DISAGREE'}")
    return agrees


def refuse_all(program, folder):
    verdicts = []
    for name, (changes, expected) in REFUSALS.items():
        shutil.copytree(folder / "llama3", folder / name)
        path = folder / name / "config.json"
        config = json.loads(path.read_text())
        if "rope_scaling" in changes:
            config.pop("rope_parameters", None)
        path.write_text(json.dumps(config | changes))
        errors, succeeded = run_program(program, 1, 1, 1, folder, folder / "nowhere", [name])
        is_named = not succeeded and str(path) in errors and expected in errors
        verdicts.append(is_named)
        print(f"{name:<12} {'refused' if is_named else 'NOT REFUSED BY NAME: ' + errors}")
    return verdicts


def main():
    torch.set_num_threads(1)
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for family, config in FAMILIES.items():
            make_model(config).save_pretrained(folder / family)
        text, begins = torch.randint(VOCAB, (STEPS, ROWS, TOKENS + 1)), torch.rand(ROWS, TOKENS) < 0.3
        torch.save({"text": text, "begins": begins}, folder / "tokens")
        # Forked: importing takes seconds.
        torch.multiprocessing.start_processes(train_under_fsdp2, (2, folder), 2, start_method="fork")
        adapters = [compare_adapters(sys.argv[1], folder, ranks, tp) for ranks, tp in ((2, 1), (4, 2))]
        adapters.append(compare_4_bits(sys.argv[1], folder))
        verdicts = compare_all(sys.argv[1], folder) + adapters
        verdicts += refuse_all(sys.argv[1], folder)
    if not all(verdicts):
        raise SystemExit("this library and transformers disagree")


if __name__ == "__main__":
    main()
