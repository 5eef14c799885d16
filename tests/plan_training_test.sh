#!/usr/bin/env bash
# The planning program as its users meet it: wrong flags are refused by name, its tables have what they promise, and the largest
# model on 16,384 ranks takes little memory. Run from the repository root, after everything was built.
set -euo pipefail

program=bazel-bin/programs/planner/plan_training
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fail() {
  echo "plan_training_test: $*" >&2
  exit 1
}

# The program refuses the arguments after $1, in one line that has the text $1.
expect_refusal() {
  local text=$1 status=0
  shift
  "$program" "$@" > "$work/out" 2> "$work/err" || status=$?
  [[ $status == 1 ]] || fail "$*: exit status $status: $(cat "$work/err")"
  grep --quiet --fixed-strings -- "$text" "$work/err" || fail "$*: no '$text' in: $(cat "$work/err")"
  [[ $(wc -l < "$work/err") == 1 ]] || fail "$*: more than one line: $(cat "$work/err")"
}

# The program takes the arguments after $1 and prints the text $1.
expect_output() {
  local text=$1
  shift
  timeout 60 "$program" "$@" > "$work/out" 2> "$work/err" || fail "$*: $(cat "$work/err")"
  grep --quiet --fixed-strings -- "$text" "$work/out" || fail "$*: no '$text' in: $(cat "$work/out")"
}

mkdir "$work/gpt"
echo '{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}' > "$work/gpt/config.json"

expect_refusal "--config: llama-9b, allowed are llama-8b, llama-70b, llama-405b and a folder" --config=llama-9b
expect_refusal 'model_type is "gpt2", allowed are llama' --config="$work/gpt"
expect_refusal "--tokens: 200000, allowed is 131072 or less" --tokens=200000
expect_refusal "--mesh: 8, allowed are two numbers" --mesh=8
expect_refusal "--rank: 8, allowed is less than 8" --ranks=8 --rank=8
expect_refusal "--attention: flash, allowed are fused and composed" --attention=flash
expect_refusal "--tflops: 0, allowed is a number above 0" --tflops=0
expect_refusal "--units: none, allowed are blocks, layers and root" --units=none
expect_refusal "unexpected argument 'llama-8b': the model is named by --config" llama-8b

# Takes no memory for values that are not there: of 1.6 TB of parameters nothing.
big=(--config=llama-405b --mesh=2048x8 --tp=8 --param_dtype=bf16 --reduce_dtype=f32 --batch=1)
expect_output "405.85 B parameters on 16384 ranks: 2048 dp x 8 tp" "${big[@]}"
grep --quiet "collective  *ranks  *count  *GiB received  *link" "$work/out" || fail "no such heads in: $(cat "$work/out")"
grep --quiet "dp  *all-gather  *2048 .*between nodes" "$work/out" || fail "no such gathers in: $(cat "$work/out")"
grep --quiet "tp  *all-reduce  *8 .*within a node" "$work/out" || fail "no such reductions in: $(cat "$work/out")"
python3 - "$program" "${big[@]}" << 'EOF' || fail "more than 2 GiB"
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
sys.exit(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss > 2 << 20)
EOF

# What fits is told, with the cheapest first, and what nothing fits into.
mkdir "$work/llama"
echo '{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "vocab_size": 96, "hidden_size": 64,
  "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 112,
  "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": false}' \
  > "$work/llama/config.json"
small=(--config="$work/llama" --ranks=16 --batch=1 --param_dtype=bf16 --reduce_dtype=f32 --tokens=64)
expect_output "peak GiB" "${small[@]}" --fit=80
[[ $(wc -l < "$work/out") == 7 ]] || fail "--fit=80: $(cat "$work/out")"
expect_output "peak GiB" "${small[@]}" --fit=80 --shard_optimizer
expect_refusal "--tp and --fit exclude each other" "${small[@]}" --fit=80 --tp=2
expect_output "nothing fits; the smallest takes" "${small[@]}" --fit=0.0001
echo "plan_training_test: passed"
