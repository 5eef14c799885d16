#!/usr/bin/env bash
# The page of a run as a browser shows it: of a good configuration and of three bad ones, in light and in dark. Every chart is
# drawn, no script fails, nothing is fetched, and the advice is right. Run from the repository root, after everything was built
# and NEEDS_BROWSER=1 tools/setup has installed the browser. Where no browser works, it says so and opens no page.
#
#   KEEP=folder tests/run_report_test.sh    leaves the pages and pictures of them there
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

program=bazel-bin/programs/trainer/train_transformer
cat programs/trainer/{,*/}*.cc dtensor/ops/*.cc > "$work/text"

fail() {
  echo "run_report_test: $*" >&2
  exit 1
}

# Trains with the arguments after $1, and writes the page $1.
train() {
  local name=$1
  shift
  timeout 120 "$program" --data="$work/text" --generate=0 --validate_every=0 --report="$work/$name.html" "$@" \
    > "$work/out" 2>&1 || fail "$name: training failed: $(cat "$work/out")"
}

source tests/support/browser.sh
has_browser=
if browser_works; then
  has_browser=1
else
  echo "run_report_test: NOT TESTED: pages in a browser, for there is no chromium that opens one" >&2
fi

# What a browser does with $1, with the options after it; what it and the page's scripts complain of is in $work/err.
browse() {
  local page=$1
  shift
  chromium_with "$@" "file://$page" 2> "$work/err" || fail "$page: chromium failed: $(tail -5 "$work/err")"
  ! grep "CONSOLE" "$work/err" > "$work/console" || fail "$page: $(cat "$work/console")"
}

# The page $1 with a script that counts the points of each canvas that are painted, and looks for what the page fetched.
probe() {
  sed 's|</body>||; s|</html>||' "$work/$1.html"
  cat << 'EOF'
<script>
addEventListener("load", () => setTimeout(() => {
  const say = (what, value) => document.body.append(Object.assign(document.createElement("pre"),
    { textContent: `probe ${what} ${value}` }));
  for (const canvas of document.querySelectorAll("canvas")) {
    const points = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    const colours = new Set();
    for (let i = 0; i < points.length; i += 4) if (points[i + 3] === 255) colours.add(points.slice(i, i + 3).join());
    say(canvas.id, colours.size >= 3 ? "drawn" : "empty");
  }
  say("fetched", performance.getEntriesByType("resource").length);
}, 500));
</script></body></html>
EOF
}

# The page $1 shows every chart, and the texts after it.
expect_page() {
  [[ -n $has_browser ]] || return 0
  local name=$1 text chart
  shift
  probe "$name" > "$work/probed.html"
  browse "$work/probed.html" --dump-dom > "$work/dom"
  for chart in loss throughput timeline residency unsharded memory; do
    grep --quiet "probe $chart drawn" "$work/dom" || fail "$name: nothing is drawn in $chart"
  done
  grep --quiet "probe fetched 0" "$work/dom" || fail "$name: the page needs the network"
  for text in "$@"; do
    grep --quiet --fixed-strings -- "$text" "$work/dom" || fail "$name: no '$text' in: $(grep --after-context 20 'id="advice"' "$work/dom")"
  done
}

# Pictures of the page $1 in dark (0) and in light (1), which differ.
take_pictures() {
  [[ -n $has_browser ]] || return 0
  local name=$1 scheme
  for scheme in 0 1; do
    browse "$work/$name.html" --screenshot="$work/$name-$scheme.png" --blink-settings=preferredColorScheme=$scheme > /dev/null
    [[ -s $work/$name-$scheme.png ]] || fail "$name: no picture"
  done
  ! cmp --quiet "$work/$name-0.png" "$work/$name-1.png" || fail "$name: dark is as light"
}

# How often the page $1 advises something.
advice_count() { grep --only-matching '"reason"' "$work/$1.html" | wc -l; }

train good --steps=12 --tokens=64
expect_page good "A training run of 2 ranks" "blocks" "all units, unsharded and padded" '<td>block0</td><td>9</td><td>721.0 KiB</td><td>2</td>' "2 of 2"
take_pictures good
! grep --quiet "all-gather over" "$work/good.html" || fail "the exchange of losses is shown as a redistribution"

train parallel --ranks=4 --tp=2 --steps=4 --batch=1
expect_page parallel "A training run of 4 ranks"
grep --quiet "all-reduce over tp, Partial(sum) -&gt; Replicate()\|all-reduce over tp, Partial(sum) -> Replicate()" "$work/parallel.html" ||
  fail "no redistributions of tensor parallelism"
# On a busy machine ranks may wait for each other; what units are is no accident.
! grep --extended-regexp --quiet "Merge|Cut " "$work/good.html" || fail "advice on good units: $(grep reason "$work/good.html")"

train layers --steps=6 --units=layers --batch=1
expect_page layers "Merge 17 small units with their neighbours" "block0.attention_norm (512 bytes)" "--units blocks"

train root --steps=6 --units=root
expect_page root "Cut the root into several units" "The root holds 100 %"
! grep --quiet "Merge" "$work/root.html" || fail "the root alone is no small unit"

FSDP_PEER_MEMORY=off train waiting --ranks=4 --steps=15 --batch=1 --tokens=16
expect_page waiting "wait less for each other" "--accumulate" "<option>3</option>"

# With the other files of a run.
train beside --steps=5 --metrics="$work/run.jsonl" --profile="$work/trace.json" --accumulate=2
cmp "$work/trace.json" "$work/beside.trace.rank0.json" || fail "the profile is not rank 0's trace"
[[ $(wc -l < "$work/run.jsonl") == 5 ]] || fail "no line for each step: $(cat "$work/run.jsonl")"
grep --quiet "steps 2 to 4" "$work/beside.html" || fail "not the steps of the profile"
train one --ranks=1 --steps=1
[[ $(advice_count one) == 0 ]] || fail "advice on one rank"

# Rank 1 leaves its trace elsewhere, as on another host, and what an earlier run has left here is not taken for it.
mkdir "$work/elsewhere"
echo "{}" > "$work/split.trace.rank1.json"
export MASTER_ADDR=127.0.0.1 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_PORT
MASTER_PORT=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
split=("$PWD/$program" --data="$work/text" --generate=0 --validate_every=0 --steps=3 --batch=1 --report=split.html)
(cd "$work/elsewhere" && RANK=1 timeout 60 "${split[@]}" > out 2>&1) &
(cd "$work" && RANK=0 timeout 60 "${split[@]}" > "$work/out" 2>&1) || fail "split: training failed: $(cat "$work/out")"
wait "$!" || fail "split: training failed on rank 1: $(cat "$work/elsewhere/out")"
unset MASTER_ADDR WORLD_SIZE LOCAL_RANK MASTER_PORT
expect_page split "No timeline of rank 1: split.trace.rank1.json is not there"

# A file is of one flag alone; what is there stays.
expect_refused() {
  local status=0 message=$1
  shift
  timeout 120 "$program" --data="$work/text" --generate=0 --report="$work/good.html" "$@" > "$work/out" 2> "$work/err" || status=$?
  [[ $status == 1 ]] || fail "$*: exit status $status"
  grep --quiet --fixed-strings -- "$message" "$work/err" || fail "$*: no '$message' in: $(cat "$work/err")"
  ! grep --quiet "^step" "$work/out" || fail "$* is told after training"
}
cp "$work/good.html" "$work/page"
cp "$work/good.trace.rank0.json" "$work/trace"
expect_refused "--report: $work/good.html is the file of --metrics" --metrics="$work/good.html"
expect_refused "--report: $work/good.html is the file of --profile" --profile="$work/good.html"
expect_refused "--profile: $work/good.trace.rank0.json is a trace of --report" --profile="$work/good.trace.rank0.json"
cmp "$work/good.html" "$work/page" || fail "a refused run has changed the page"
cmp "$work/good.trace.rank0.json" "$work/trace" || fail "a refused run has changed a trace"

# A finished run that is started again keeps its page.
train finished --steps=3 --checkpoint="$work/checkpoints"
cp "$work/finished.html" "$work/page"
train finished --steps=3 --checkpoint="$work/checkpoints" --resume
cmp "$work/finished.html" "$work/page" || fail "the page of a finished run is lost"
[[ -e $work/finished.trace.rank1.json ]] || fail "a trace of a finished run is lost"
grep --quiet "^--report: $work/finished.html is not written: no step was left to do" "$work/out" ||
  fail "not told that there is no new page: $(cat "$work/out")"

# With HFSDP, gathers over the outer dimension count.
FSDP_PEER_MEMORY=off train outer --ranks=4 --steps=4 --batch=1 --replicas=2 --shard_optimizer
grep --quiet "outer_all_gather" "$work/outer.trace.rank0.json" || fail "no gather over the outer dimension"

for flag in report metrics profile; do
  for ranks in 1 2; do
    status=0
    "$program" --data="$work/text" --ranks=$ranks --$flag="$work/no/file" > "$work/out" 2> "$work/err" || status=$?
    [[ $status == 1 ]] || fail "--$flag in no folder: exit status $status"
    grep --quiet "^--$flag: $work/no/file cannot be written: No such file or directory" "$work/err" ||
      fail "--$flag in no folder: $(cat "$work/err")"
    ! grep --quiet "^step" "$work/out" || fail "--$flag in no folder is told after training"
  done
done

if [[ -n ${KEEP:-} ]]; then
  for name in layers root waiting; do take_pictures "$name"; done
  cp "$work"/*.html "$work"/*.png "$KEEP"
fi
