#!/usr/bin/env bash
# The bundle of tools/test_gpu: small enough, and its steps that need no GPU pass in an empty folder, with no variable of this shell's.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/../tools/setup"
cd "$repository"

readonly MOST_BYTES=$((60 << 20))
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

tools/test_gpu --bundle "$work/bundle.tar.xz"
[[ $(stat --format=%s "$work/bundle.tar.xz") -le $MOST_BYTES ]]
tar --extract --file "$work/bundle.tar.xz" --directory "$work"
cd "$work/gpu_bundle"
env --ignore-environment PATH=/usr/bin:/bin HOME="$work" "$(python_of_torch)" \
  run_bundle.py --device cpu --only facts one_rank fake_worlds steps two_ranks
grep --quiet 'NOT SHOWN ON CUDA' report.md
