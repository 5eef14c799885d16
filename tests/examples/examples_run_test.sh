#!/usr/bin/env bash
# Every program of examples/ runs as its first comment says: on several ranks of this machine it ends well, its last line tells
# of a loss that falls to less than a tenth, and that line is the same on any number of ranks.
set -euo pipefail

export OMP_NUM_THREADS=1  # ranks share the cores
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

export OMP_NUM_THREADS=1  # as the comments of the programs ask for

fail() {
  echo "examples_run_test: $*" >&2
  exit 1
}

free_port() {
  python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

# Runs example $2 on $1 ranks with the arguments after; sets `last_line` to that of rank 0.
run_ranks() {
  local ranks=$1 program=$2 port rank processes=()
  shift 2
  port=$(free_port)
  for ((rank = 0; rank < ranks; ++rank)); do
    RANK=$rank WORLD_SIZE=$ranks MASTER_ADDR=localhost MASTER_PORT=$port timeout 240 "examples/$program" "$@" \
      > "$work/rank$rank" 2>&1 &
    processes+=($!)
  done
  for rank in "${!processes[@]}"; do
    wait "${processes[rank]}" || fail "$program: rank $rank of $ranks exited with $?: $(cat "$work/rank$rank")"
  done
  last_line=$(tail -n 1 "$work/rank0")
  echo "$program on $ranks: $last_line"
}

# "WORD FIRST -> LAST", where LAST is less than a tenth of FIRST.
falls() { awk '{ exit !(NF == 4 && $3 == "->" && $2 > 0 && $4 < $2 / 10) }' <<< "$1"; }

# As lines of rank 0: sums in another order may change the last digit or two.
alike() {
  awk -v one="$1" 'function off(a, b) { return a > b ? a - b : b - a }
    { split(one, o); exit !($1 == o[1] && off($2, o[2]) <= 0.002 && off($4, o[4]) <= 0.002) }' <<< "$2"
}

# Example $1 on as many ranks as $2, $3, ... say.
expect_same_on() {
  local program=$1 ranks first_line=
  shift
  for ranks in "$@"; do
    run_ranks "$ranks" "$program"
    falls "$last_line" || fail "$program on $ranks ranks: its last line is '$last_line': $(cat "$work/rank0")"
    alike "${first_line:=$last_line}" "$last_line" ||
      fail "$program: '$last_line' on $ranks ranks, '$first_line' on $1"
  done
}

# The last line of example $1 is `of_first_model`.
expect_as_first_model() {
  alike "$of_first_model" "$last_line" || fail "$1: '$last_line', first_model: '$of_first_model'"
}

expect_same_on first_model 1 2 4
of_first_model=$last_line
for program in examples/*; do
  [[ -f $program && -x $program ]] || continue
  case $(basename "$program") in
    first_model) ;;
    hybrid_sharding)
      expect_same_on hybrid_sharding 2 4
      expect_as_first_model hybrid_sharding
      ;;
    deferred_init)
      expect_same_on deferred_init 1 2
      expect_as_first_model deferred_init
      ;;
    checkpoints)
      # Three runs of a third each, on other ranks each time.
      for ranks in 2 4 1; do run_ranks "$ranks" checkpoints "$work/runs"; done
      expect_as_first_model checkpoints
      ;;
    tensor_parallel | context_parallel | experts) expect_same_on "$(basename "$program")" 1 2 4 ;;
    *) expect_same_on "$(basename "$program")" 1 2 ;;
  esac
done
