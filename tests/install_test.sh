#!/usr/bin/env bash
# What tools/install installs is enough for a program outside the repository: it builds with CMake and with pkg-config, and
# trains sharded, on one rank and on two. Run from the repository root; TORCH_DIR says where LibTorch is.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fail() {
  echo "install_test: $*" >&2
  exit 1
}

# Fails unless $1 equals $2; $3 says what was compared.
expect_equal() { [[ $1 == "$2" ]] || fail "$3: expected '$2', got '$1'"; }

free_port() {
  python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

# Runs program $1 on $2 ranks; prints their output, sorted.
run_ranks() {
  local port rank processes=()
  port=$(free_port)
  for ((rank = 0; rank < $2; ++rank)); do
    RANK=$rank WORLD_SIZE=$2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port timeout 60 "$1" > "$work/rank$rank" &
    processes+=($!)
  done
  for rank in "${!processes[@]}"; do
    wait "${processes[rank]}" || fail "$1: rank $rank of $2 exited with $?"
  done
  for ((rank = 0; rank < $2; ++rank)); do cat "$work/rank$rank"; done
}

# Each weight is 1 and its gradient 1, so after a step of 0.25 the twelve of them sum to 9.
expect_sharded_step() {
  expect_equal "$(run_ranks "$1" 1)" "rank 0 of 1 holds 4 of 4 rows, sum 9" "$1 on one rank"
  expect_equal "$(run_ranks "$1" 2)" $'rank 0 of 2 holds 2 of 4 rows, sum 9\nrank 1 of 2 holds 2 of 4 rows, sum 9' \
    "$1 on two ranks"
}

build_with_cmake() {
  cmake -S "$work/consumer" -B "$work/build" -DCMAKE_PREFIX_PATH="$work/prefix" > "$work/cmake.log" &&
    cmake --build "$work/build" >> "$work/cmake.log"
}

build_with_pkg_config() {
  local flags
  flags=$(PKG_CONFIG_PATH="$work/prefix/lib/pkgconfig" pkg-config --cflags --libs fully_shard) &&
    g++ "$work/consumer/main.cc" -o "$work/consumer_pkg_config" $flags
}

# Each installed header needs nothing before it.
compile_headers() {
  local flags header
  flags=$(PKG_CONFIG_PATH="$work/prefix/lib/pkgconfig" pkg-config --cflags fully_shard)
  for header in $(cd "$work/prefix/include" && find . -name '*.h'); do
    echo "#include \"$header\"" | g++ $flags -Wall -Wextra -Werror -fsyntax-only -x c++ - || fail "$header does not compile"
  done
}

tools/install "$work/built"
mv "$work/built" "$work/prefix"  # nothing in it may refer to where it was installed
cp -r tests/consumer "$work/consumer"

build_with_cmake & cmake_build=$!
build_with_pkg_config & pkg_config_build=$!
compile_headers
wait "$cmake_build" || fail "the program does not build with CMake: $(cat "$work/cmake.log")"
wait "$pkg_config_build" || fail "the program does not build with pkg-config"
expect_sharded_step "$work/build/consumer"
expect_sharded_step "$work/consumer_pkg_config"

[[ -e $work/prefix/include/fully_shard/fully_shard.h ]] || fail "fully_shard.h is not installed"
[[ ! -e $work/prefix/include/fully_shard/unit.h ]] || fail "an internal header is installed"

mkdir "$work/other_torch"
echo "1.0.0" > "$work/other_torch/build-version"
if TORCH_DIR=$work/other_torch cmake -S "$work/consumer" -B "$work/refused" -DCMAKE_PREFIX_PATH="$work/prefix" \
  > "$work/refused.log" 2>&1; then
  fail "CMake accepted a LibTorch of another version"
fi
grep -q "there is 1.0.0 in" "$work/refused.log" || fail "CMake does not name the other version: $(cat "$work/refused.log")"
