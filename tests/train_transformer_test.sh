#!/usr/bin/env bash
# The example program as its users meet it: wrong flags are told once and by name, it ends cleanly by signals and when a rank
# dies, and it never calls lost output a success. Run from the repository root, after everything was built.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

program=bazel-bin/examples/train_transformer
cat examples/*.cc dtensor/families/*.cc > "$work/text"
small=(--data="$work/text" --width=16 --heads=2 --kv_heads=1 --blocks=1 --tokens=16 --batch=1 --generate=0)
endless=("${small[@]}" --steps=1000000 --validate_every=0)

fail() {
  echo "train_transformer_test: $*" >&2
  exit 1
}

# Runs the program with the arguments after $1; its exit status must be $1. Its output is in $work/out and $work/err.
expect_exit() {
  local expected=$1 status=0
  shift
  timeout 120 "$program" "$@" > "$work/out" 2> "$work/err" || status=$?
  [[ $status == "$expected" ]] || fail "$*: exit status $status, expected $expected: $(cat "$work/err")"
}

# The program refuses the arguments after $1 before any rank starts, in one line that has the text $1.
expect_refusal() {
  local text=$1
  shift
  expect_exit 1 "$@"
  grep --quiet --fixed-strings -- "$text" "$work/err" || fail "$*: no '$text' in: $(cat "$work/err")"
  [[ $(wc -l < "$work/err") == 1 ]] || fail "$*: more than one line: $(cat "$work/err")"
}

# Starts an endless training of two ranks; $job is its process, $ranks are theirs.
start_training() {
  "$program" "${endless[@]}" > "$work/out" 2> "$work/err" &
  job=$!
  for ((i = 0; i < 300; ++i)); do
    grep --quiet "^step" "$work/out" && break
    sleep 0.1
  done
  ranks=$(pgrep --parent "$job") || fail "no ranks are running: $(cat "$work/err")"
  [[ $(wc -w <<< "$ranks") == 2 ]] || fail "expected two ranks, found: $ranks"
}

# The training ends with status $1, and none of its ranks is left.
expect_end() {
  local status=0 rank
  wait "$job" || status=$?
  [[ $status == "$1" ]] || fail "$2: exit status $status, expected $1: $(cat "$work/err")"
  for rank in $ranks; do
    for ((i = 0; i < 50; ++i)); do
      kill -0 "$rank" 2> /dev/null || break
      sleep 0.1
    done
    ! kill -0 "$rank" 2> /dev/null || fail "$2: rank $rank still runs"
  done
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
if ! nvidia-smi > /dev/null 2>&1; then
  expect_refusal "--device: cuda, but LibTorch finds no CUDA device here" --device=cuda
fi

expect_exit 0 --help
grep --quiet -- "--ranks" "$work/out" || fail "--help does not show the flags"

expect_exit 0 "${small[@]}" --steps=3 --compare
grep --quiet "agree" "$work/out" || fail "the comparison does not agree: $(cat "$work/out")"
[[ ! -s $work/err ]] || fail "a good run complains: $(cat "$work/err")"

status=0
timeout 120 "$program" "${small[@]}" --steps=2 > /dev/full 2> "$work/err" || status=$?
[[ $status == 1 ]] || fail "exit status $status where nothing could be written"
grep --quiet "could not be written" "$work/err" || fail "a full disk is not told: $(cat "$work/err")"

for signal in TERM:143 INT:130 HUP:129; do
  start_training
  kill "-${signal%:*}" "$job"
  expect_end "${signal#*:}" "after ${signal%:*}"
done

start_training
killed=${ranks%%$'\n'*}
kill -KILL "$killed"
expect_end 1 "after the death of a rank"
grep --quiet "rank 0 (process $killed) was killed by signal 9" "$work/err" || fail "the dead rank is not named: $(cat "$work/err")"
[[ $(wc -l < "$work/err") -le 6 ]] || fail "too many words about a dead rank: $(cat "$work/err")"
