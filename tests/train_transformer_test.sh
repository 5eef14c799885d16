#!/usr/bin/env bash
# The example program as its users meet it: wrong flags and data are refused by name, it ends cleanly by signals, when a rank
# or the launcher dies and when its reader leaves, and it never calls lost output a success. Run from the repository root,
# after everything was built.
set -euo pipefail

work=$(mktemp -d)
job=
# After a failure no training goes on.
clean_up() {
  [[ -z $job ]] || kill -KILL -- "-$job" 2> /dev/null || true
  rm -rf "$work"
}
trap clean_up EXIT

program=bazel-bin/programs/trainer/train_transformer
cat programs/trainer/{,*/}*.cc dtensor/ops/*.cc > "$work/text"
small=(--data="$work/text" --width=16 --heads=2 --kv_heads=1 --blocks=1 --tokens=16 --batch=1 --generate=0)
endless=("${small[@]}" --steps=1000000 --validate_every=20)  # The validations show that it goes on.

fail() {
  echo "train_transformer_test: $*" >&2
  exit 1
}

# Runs the command after $1; its exit status must be $1. Its output is in $work/out and $work/err.
expect_status() {
  local expected=$1 status=0
  shift
  timeout 120 "$@" > "$work/out" 2> "$work/err" || status=$?
  [[ $status == "$expected" ]] || fail "$*: exit status $status, expected $expected: $(cat "$work/err")"
}

# Runs the program with the arguments after $1; its exit status must be $1.
expect_exit() {
  local expected=$1
  shift
  expect_status "$expected" "$program" "$@"
}

# The program refuses the arguments after $1, in one line that has the text $1.
expect_refusal() {
  local text=$1
  shift
  expect_exit 1 "$@"
  grep --quiet --fixed-strings -- "$text" "$work/err" || fail "$*: no '$text' in: $(cat "$work/err")"
  [[ $(wc -l < "$work/err") == 1 ]] || fail "$*: more than one line: $(cat "$work/err")"
}

# The number of lines that tell of steps the training has done.
steps_told() { grep --count --extended-regexp "^step|after [1-9][0-9]* steps" "$work/out" || true; }

# Waits until there are $1 such lines.
wait_for_steps() {
  local i
  for ((i = 0; i < 300; ++i)); do
    [[ $(steps_told) -lt $1 ]] || return 0
    sleep 0.1
  done
  fail "no $1 lines about steps within 30 s: $(cat "$work/out" "$work/err")"
}

# Starts an endless training of two ranks, in a process group of its own; $job is its launcher, $ranks are the ranks. What a
# script starts in the background ignores SIGINT, what a terminal starts does not.
start_training() {
  : > "$work/out"  # An earlier training's steps are not this one's.
  setsid env --default-signal=INT "$program" "${endless[@]}" > "$work/out" 2> "$work/err" &
  job=$!
  wait_for_steps 1
  ranks=$(pgrep --parent "$job") || fail "no ranks are running: $(cat "$work/err")"
  [[ $(wc -w <<< "$ranks") == 2 ]] || fail "expected two ranks, found: $ranks"
}

now() { echo "${EPOCHREALTIME/[.,]/}"; }  # in microseconds

# Whether process $1 has ended; one that its parent has not asked about yet has, too.
has_ended() {
  local state
  state=$(ps -o state= -p "$1") || return 0
  [[ $state == Z ]]
}

# Stops process $1, which takes a moment until its last thread stands: before that a signal could still end it.
pause() {
  local i
  kill -STOP "$1"
  for ((i = 0; i < 50; ++i)); do
    [[ -n $(ps -L -o state= -p "$1" | tr -d ' T\n') ]] || return 0
    sleep 0.1
  done
  fail "process $1 does not stop: $(ps -L -o state= -p "$1")"
}

# The launcher ends with status $1, and none of its ranks is left, within $3 seconds (by default 10) from here.
expect_end() {
  local status=0 seconds=${3:-10} process deadline
  deadline=$(($(now) + seconds * 1000000))
  for process in "$job" $ranks; do
    until has_ended "$process"; do
      [[ $(now) -lt $deadline ]] || fail "$2: process $process still runs after $seconds s: $(cat "$work/err")"
      sleep 0.1
    done
  done
  wait "$job" 2> /dev/null || status=$?
  job=
  [[ $status == "$1" ]] || fail "$2: exit status $status, expected $1: $(cat "$work/err")"
}

expect_refusal "unexpected argument 'my/text'" my/text
expect_refusal "--data: no such file or folder: no/such/text" --data=no/such/text
expect_refusal "--threads: 0, allowed is 1 or more" --threads=0
expect_refusal "--lr: nan" --lr=nan
expect_refusal "--lr: -1" --lr=-1
expect_refusal "--temperature: inf" --temperature=inf
expect_refusal "--width: 100, allowed are multiples of 8" --width=100
expect_refusal "--kv_heads: 3, allowed are divisors of --heads, 4" --kv_heads=3
expect_refusal "--optimizer: adagrad, allowed are adamw and sgd" --optimizer=adagrad
expect_refusal "--ranks: 0, allowed is 1 or more" --ranks=0
expect_refusal "--param_dtype: int8, allowed are bf16, f16 and f32" --param_dtype=int8
expect_refusal "--reshard_after_forward: maybe, allowed are true, false and a number" --reshard_after_forward=maybe
expect_refusal "--compare and --param_dtype or --reduce_dtype exclude each other" --param_dtype=bf16 --compare
expect_refusal "--replicas: 3, allowed are divisors of the number of ranks, 2" --replicas=3
expect_refusal "--shard_optimizer needs 2 or more replicas" --shard_optimizer
expect_refusal "--mesh: 2by1, allowed are two numbers, as 2x2" --mesh=2by1
expect_refusal "--mesh and --replicas exclude each other" --mesh=2x1 --replicas=2
expect_refusal "--mesh: 2x2x2, allowed are two numbers, as 2x2" --mesh=2x2x2
expect_refusal "--mesh: 2x4, whose last number must be --tp, 2" --mesh=2x4 --tp=2
expect_refusal "--tp: 2, allowed are divisors of the number of ranks, 3" --ranks=3 --tp=2
expect_refusal "--sequence_parallel needs --tp" --sequence_parallel
expect_refusal "--schedule: linear, allowed are constant and cosine" --schedule=linear
expect_refusal "--compare and --accumulate or --clip exclude each other" --compare --clip=1
expect_refusal "--documents: mixed, allowed are joined and separate" --documents=mixed
expect_refusal "--end_of_document needs --documents=separate" --end_of_document=10
expect_refusal "--end_of_document: 256, allowed is less than 256, the vocabulary" --documents=separate --end_of_document=256
expect_refusal "--end_of_document: 10, but $work/text is text, whose files are its documents" --data="$work/text" \
  --documents=separate --end_of_document=10
expect_refusal "--export: $work is there already" --export="$work"
expect_refusal "--export: /dev/null/x cannot be made: Not a directory" --export=/dev/null/x
expect_refusal "--export: $work/new/ is the file of --checkpoint, $work/new, too" --export="$work/new/" --checkpoint="$work/new"
expect_refusal "--report: $work/text would be written over, and --data reads it" --data="$work/text" --report="$work/text"
expect_refusal "--ranks: 1000000 processes on this machine, allowed are" --ranks=1000000
expect_refusal "--ranks: 1099511627776, allowed are 1048576 or less" --ranks=1099511627776
expect_refusal "--ranks: 3, and --mesh, 2x1, has 2" --mesh=2x1 --ranks=3
expect_refusal "--lora_targets: q_proj, allowed are query, key" --lora=4 --lora_targets=q_proj
expect_refusal "--lora_base: nf4 needs --lora" --lora_base=nf4
expect_refusal "--lora_base=nf4 and --tp exclude each other" --lora=4 --lora_base=nf4 --tp=2
expect_refusal "--cp: 2, allowed are divisors of the ranks that shard, 3" --ranks=3 --cp=2
expect_refusal "--ep needs a model with experts" --ep=2
expect_refusal "--tp of a model with experts needs --sequence_parallel" --tp=2 --experts=4
expect_refusal "--gather_codec: fp4, allowed are mxfp8, mxint8, fp8 and nf4" --gather_codec=fp4
expect_refusal "--reduce_codec: mxfp8, allowed is mxint8" --reduce_codec=mxfp8
expect_refusal "--compare and --gather_codec or --reduce_codec exclude each other" --compare --gather_codec=mxfp8
expect_refusal "--batch: 9223372036854775807, allowed with --tokens 128 are" --batch=9223372036854775807
expect_refusal "--accumulate: 1000000000000, allowed are" --accumulate=1000000000000
expect_refusal "--init_from=: has no value" --init_from=
expect_refusal "--init_from: has no value" --init_from ""
expect_refusal "$work/config.json: no such file" --init_from="$work"
expect_refusal "Unknown command line flag 'nonsense'" --nonsense=1
expect_refusal "Illegal value 'abc' specified for flag 'steps'" --steps=abc
if ! nvidia-smi > /dev/null 2>&1; then
  expect_refusal "--device: cuda, but LibTorch finds no CUDA device here" --device=cuda
fi

touch "$work/empty"
expect_refusal "--data: $work/empty has 0 bytes of text, at least 65536 are needed" --data="$work/empty"
echo -n x > "$work/byte"
expect_refusal "--data: $work/byte has 1 bytes of text, at least 65536 are needed" --data="$work/byte"
mkdir "$work/binaries"
cp "$program" "$work/binaries"
expect_refusal "--data: $work/binaries has no file of text, nor one of tokens" --data="$work/binaries"
# Reading this file fails even for root.
expect_refusal "--data: cannot read /proc/self/mem" --data=/proc/self/mem

expect_exit 1 "${small[@]}" --steps=5 --lr=1e30 --checkpoint="$work/diverged" --save_every=1
grep --quiet "the loss is " "$work/err" || fail "a loss that is not finite: $(cat "$work/err")"

# Tensor parallelism leaves the last norm alone, which is a unit by itself.
expect_exit 0 "${small[@]}" --ranks=4 --tp=2 --steps=2 --checkpoint="$work/parallel"
expect_exit 0 "${small[@]}" --ranks=2 --steps=3 --checkpoint="$work/parallel/" --resume
grep --quiet "resumed after step 2" "$work/out" || fail "no resume at another mesh: $(cat "$work/out")"
expect_exit 0 "${small[@]}" --ranks=2 --steps=3 --checkpoint="$work/parallel" --resume
grep --quiet "nothing is left to do" "$work/out" || fail "not told that nothing is left: $(cat "$work/out")"

expect_exit 0 --help
grep --quiet -- "--ranks" "$work/out" || fail "--help does not show the flags"

expect_exit 0 "${small[@]}" --steps=3 --param_dtype=bf16 --reduce_dtype=f32 --reshard_after_forward=false
grep --quiet "validation loss after 3 steps" "$work/out" || fail "no training in bf16: $(cat "$work/out")"

expect_exit 0 "${small[@]}" --steps=3 --compare
expect_exit 0 "${small[@]}" --steps=3 --compare --deferred_init
expect_exit 0 "${small[@]}" --steps=3 --compare --mesh=2x1 --checkpoint_activations
expect_exit 0 "${small[@]}" --steps=3 --compare --mesh=2x2 --shard_optimizer
expect_exit 0 "${small[@]}" --steps=3 --compare --mesh=1x2 --tp=2 --generate=5
expect_exit 0 "${small[@]}" --steps=3 --compare --mesh=2x1x2 --tp=2 --sequence_parallel --checkpoint_activations
expect_exit 0 "${small[@]}" --steps=3 --compare --ranks=3 --cp=3 --checkpoint_activations
expect_exit 0 "${small[@]}" --steps=3 --compare --ranks=4 --cp=2 --tp=2
expect_exit 0 "${small[@]}" --steps=3 --compare --ranks=4 --cp=2 --ep=2 --experts=3
expect_exit 0 "${small[@]}" --steps=3 --compare --ranks=4 --ep=2 --tp=2 --sequence_parallel --experts=5
grep --quiet "agree" "$work/out" || fail "the comparison does not agree: $(cat "$work/out")"
[[ ! -s $work/err ]] || fail "a good run complains: $(cat "$work/err")"

# Fails unless the losses of the steps in the files $1 and $2 are equal within rounding, and of as many steps as $3. What
# rounding becomes is how far $work/1.jsonl is from $work/added-*.jsonl, of one rank, too, that adds up in other orders.
expect_same_losses() {
  python3 - "$@" "$work/1.jsonl" "$work"/added-*.jsonl << 'EOF' || fail "the losses in $1 and $2 differ"
import json, sys
ours, others, one_rank, *added = ([json.loads(line) for line in open(path)] for path in sys.argv[1:3] + sys.argv[4:])
steps = list(range(1, int(sys.argv[3]) + 1))
assert [line["step"] for line in ours] == [line["step"] for line in others] == steps, (ours, others)
def largest(one, other):
    return max(abs(ours["loss"] / theirs["loss"] - 1) for ours, theirs in zip(one, other))
bound = 4 * max(2**-23, *(largest(one_rank, lines) for lines in added))
assert largest(ours, others) <= bound, (largest(ours, others), bound, ours, others)
for one in ours:
    assert one["gradient_norm"] > 0 and one["tokens_per_second"] > 0 and one["peak_bytes"] > 0, one
EOF
}

# Files of tokens: however many ranks there are, they see the same global batches in one order, after a resume too.
python3 - "$work/text" "$work/tokens.bin" << 'EOF'
import sys
data = open(sys.argv[1], "rb").read()
tokens = bytearray(2 * len(data))
tokens[::2] = data
open(sys.argv[2], "wb").write(tokens)
EOF
recipe=("${small[@]}" --data="$work/tokens.bin" --steps=6 --warmup=2 --schedule=cosine --clip=1 --validate_every=0)
expect_exit 0 "${recipe[@]}" --ranks=1 --batch=8 --metrics="$work/1.jsonl" --generate=3 --profile="$work/trace.json"
python3 -m json.tool "$work/trace.json" > /dev/null || fail "the trace is no JSON"
grep --quiet --extended-regexp "^([0-9]+ ){18}[0-9]+$" "$work/out" || fail "no tokens were generated: $(cat "$work/out")"
for times in 2 4 8; do
  expect_exit 0 "${recipe[@]}" --ranks=1 --batch=$((8 / times)) --accumulate=$times --metrics="$work/added-$times.jsonl"
done
expect_exit 0 "${recipe[@]}" --ranks=4 --batch=2 --metrics="$work/4.jsonl"
expect_same_losses "$work/1.jsonl" "$work/4.jsonl" 6
expect_exit 0 "${recipe[@]}" --ranks=2 --batch=1 --accumulate=4 --metrics="$work/accumulated.jsonl"
expect_same_losses "$work/1.jsonl" "$work/accumulated.jsonl" 6
save=(--checkpoint="$work/checkpoints" --save_every=3 --metrics="$work/resumed.jsonl")
expect_exit 0 "${recipe[@]}" --ranks=2 --batch=4 "${save[@]}"
expect_refusal "--checkpoint: $work/checkpoints has $work/checkpoints/step-0000000" "${recipe[@]}" "${save[@]}"
rm -r "$work/checkpoints/step-00000006"
head -3 "$work/resumed.jsonl" > "$work/first.jsonl" && mv "$work/first.jsonl" "$work/resumed.jsonl"
expect_exit 0 "${recipe[@]}" --ranks=4 --batch=2 "${save[@]}" --resume
expect_same_losses "$work/1.jsonl" "$work/resumed.jsonl" 6

# Separate documents: the mean is that of all targets, however they are dealt out, and sharding changes nothing.
expect_refusal "--documents: separate needs --end_of_document" "${recipe[@]}" --documents=separate
lines=("${recipe[@]}" --documents=separate --end_of_document=10)
expect_exit 0 "${lines[@]}" --ranks=1 --batch=8 --metrics="$work/lines-1.jsonl"
expect_exit 0 "${lines[@]}" --ranks=4 --batch=2 --metrics="$work/lines-4.jsonl"
expect_same_losses "$work/lines-1.jsonl" "$work/lines-4.jsonl" 6
expect_exit 0 "${lines[@]}" --ranks=2 --batch=1 --accumulate=4 --metrics="$work/lines-accumulated.jsonl"
expect_same_losses "$work/lines-1.jsonl" "$work/lines-accumulated.jsonl" 6
compared=("${small[@]}" --data="$work/tokens.bin" --documents=separate --end_of_document=10 --steps=3 --compare)
expect_exit 0 "${compared[@]}" --checkpoint_activations
expect_exit 0 "${compared[@]}" --cp=2
expect_exit 0 "${compared[@]}" --mesh=2x1x2 --tp=2 --sequence_parallel --checkpoint_activations
expect_exit 0 "${small[@]}" --data=checkpoint --documents=separate --steps=3 --param_dtype=bf16

echo -n x >> "$work/tokens.bin"
expect_refusal "$work/tokens.bin: has " "${recipe[@]}"

# To a folder of Hugging Face's and back: training goes on where it was.
expect_exit 0 "${small[@]}" --steps=2 --export="$work/exported/"
[[ ! -e $work/exported.saving && ! -e $work/exported/.saving ]] || fail "the export has left parts of it"
loss=$(grep --only-matching "validation loss after 2 steps: .*" "$work/out")
sizes_of_folder=(--data="$work/text" --tokens=16 --batch=1 --generate=0 --init_from="$work/exported")
expect_exit 0 "${sizes_of_folder[@]}" --steps=1 --export="$work/again"
grep --quiet "validation loss after 0 steps: ${loss##* }" "$work/out" || fail "not $loss: $(cat "$work/out")"
diff "$work/exported/config.json" "$work/again/config.json" || fail "the configuration has changed"
expect_exit 0 "${sizes_of_folder[@]}" --steps=1 --lora=4 --export="$work/adapters"
expect_exit 0 "${sizes_of_folder[@]}" --steps=1 --lora=4 --lora_base=nf4 --export="$work/in_4_bits"
diff "$work/adapters/adapter_config.json" "$work/in_4_bits/adapter_config.json" || fail "4 bits: another configuration"
[[ -s $work/adapters/adapter_model.safetensors && -s $work/adapters/adapter_config.json ]] || fail "no adapters"
[[ ! -e $work/adapters.saving && ! -e $work/again.saving ]] || fail "exports have left something"
expect_refusal "--width and --init_from exclude each other" "${small[@]}" --init_from="$work/exported"
expect_refusal "--tokens: 17, allowed is 16 or less" --init_from="$work/exported" --tokens=17

# A folder with a tokenizer of SentencePiece's: text is encoded and decoded by it. Its model has more tokens than one for bytes.
fixtures=tests/programs/trainer/fixtures
python3 - "$work/exported" "$work/pieces" << 'EOF'
import json, os, struct, sys
old, new = sys.argv[1:]
os.mkdir(new)
config = json.load(open(f"{old}/config.json"))
json.dump(config | {"vocab_size": 512}, open(f"{new}/config.json", "w"))
weights = open(f"{old}/model.safetensors", "rb").read()
end = 8 + struct.unpack("<Q", weights[:8])[0]
header, data = json.loads(weights[8:end]), b""
header.pop("__metadata__", None)
for tensor in header.values():
    part = weights[end + tensor["data_offsets"][0] : end + tensor["data_offsets"][1]]
    if tensor["shape"][0] == 256:
        part, tensor["shape"][0] = 2 * part, 512
    tensor["data_offsets"] = [len(data), len(data) + len(part)]
    data += part
text = json.dumps(header).encode()
open(f"{new}/model.safetensors", "wb").write(struct.pack("<Q", len(text)) + text + data)
EOF
pieces=(--data="$work/text" --tokens=16 --batch=1 --init_from="$work/pieces" --steps=2)
touch "$work/pieces/tokenizer.json"
expect_refusal "whose tokenizer.json is read by Python alone" "${pieces[@]}"
cp "$fixtures/tokenizer.model" "$work/pieces"
expect_exit 0 "${pieces[@]}" --prompt="Grüße aus Köln" --generate=5 --documents=separate --export="$work/pieces-again"
grep --quiet "^Grüße aus Köln" "$work/out" || fail "the prompt is not told again: $(cat "$work/out")"
cmp "$fixtures/tokenizer.model" "$work/pieces-again/tokenizer.model" || fail "the tokenizer is not exported"
cp "$fixtures/tokenizer.model" "$work/exported"
expect_refusal "tokenizer.model has 384 tokens, and the model's vocabulary is 256" "${sizes_of_folder[@]}"
head --bytes=5000 "$fixtures/tokenizer.model" > "$work/pieces/tokenizer.model"
expect_refusal "$work/pieces/tokenizer.model: is no whole model of SentencePiece's" "${pieces[@]}"

# Many more ranks than cores take their time, and train. They need 3 GB.
expect_exit 0 "${small[@]}" --ranks=16 --steps=1 --validate_every=0
grep --quiet "on 16 rank(s)" "$work/out" || fail "the 16 ranks are not told: $(cat "$work/out")"
grep --quiet "^step *1/1 " "$work/out" || fail "no step of 16 ranks: $(cat "$work/out")"
[[ ! -s $work/err ]] || fail "a good run of 16 ranks complains: $(cat "$work/err")"

# torchrun lies in the virtual environment whose LibTorch tools/setup has chosen. It says how many ranks there are.
torchrun=.venv/bin/torchrun
[[ -z ${TORCH_DIR:-} ]] || torchrun=${TORCH_DIR%/lib/python3*}/bin/torchrun
if [[ -x $torchrun ]]; then
  expect_status 0 "$torchrun" --standalone --nproc-per-node 2 --no-python "$program" "${small[@]}" --steps=2 --ranks=3
  grep --quiet "on 2 rank(s)" "$work/out" || fail "not torchrun's two ranks: $(cat "$work/out")"
  for step in 1 2; do
    [[ $(grep --count "^step *$step/2 " "$work/out") == 1 ]] || fail "torchrun: step $step not told once: $(cat "$work/out")"
  done
else
  echo "train_transformer_test: NOT TESTED: training under torchrun, for there is no $torchrun" >&2
fi

status=0
timeout 120 "$program" "${small[@]}" --steps=2 > /dev/full 2> "$work/err" || status=$?
[[ $status == 1 ]] || fail "exit status $status where nothing could be written"
grep --quiet "could not be written" "$work/err" || fail "a full disk is not told: $(cat "$work/err")"

# Whoever reads the output may leave: training ends by itself and says why.
statuses=(0 0)
timeout 60 "$program" "${endless[@]}" 2> "$work/err" | head -1 > "$work/out" || statuses=("${PIPESTATUS[@]}")
[[ ${statuses[*]} == "1 0" ]] || fail "exit statuses ${statuses[*]} where the reader leaves: $(cat "$work/err")"
grep --quiet "was stopped, since whoever read its output is gone" "$work/err" ||
  fail "nothing is said about the reader: $(cat "$work/err")"
[[ $(wc -l < "$work/out") == 1 ]] || fail "more or less than a line was read: $(cat "$work/out")"
! pgrep --full -- "--data=$work/text" || fail "these ranks are left after their reader"

# A signal to the launcher ends the training, and so does one to all its processes, as a terminal sends it.
for signal in TERM:143 INT:130 HUP:129; do
  for receiver in launcher group; do
    start_training
    [[ $receiver == launcher ]] && process=$job || process=-$job
    kill "-${signal%:*}" -- "$process"
    expect_end "${signal#*:}" "after ${signal%:*} to the $receiver"
    grep --quiet "stopping 2 ranks" "$work/err" || fail "no word of ${signal%:*} to the $receiver: $(cat "$work/err")"
  done
done

# A rank that does not react is killed.
start_training
pause "${ranks%%$'\n'*}"
kill -TERM "$job"
expect_end 143 "after TERM with a stopped rank"

# Ranks do not outlive their launcher.
start_training
kill -KILL "$job"
wait "$job" 2> /dev/null || true  # Otherwise bash complains later that it was killed.
expect_end 137 "after the launcher's death" 5

# A rank may pause: the others wait for it, and all go on with it.
start_training
paused=${ranks##*$'\n'}
pause "$paused"
sleep 1
told=$(steps_told)
sleep 9
[[ $(steps_told) == "$told" ]] || fail "training went on without a rank: $(cat "$work/out")"
kill -CONT "$paused"
wait_for_steps $((told + 2))
kill -TERM "$job"
expect_end 143 "after TERM with a rank that had paused"

start_training
killed=${ranks%%$'\n'*}
kill -KILL "$killed"
expect_end 1 "after the death of a rank" 2
grep --quiet "rank 0 (process $killed) was killed by signal 9" "$work/err" ||
  fail "the dead rank is not named: $(cat "$work/err")"
[[ $(wc -l < "$work/err") -le 6 ]] || fail "too many words about a dead rank: $(cat "$work/err")"
