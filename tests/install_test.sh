#!/usr/bin/env bash
# What tools/install installs is enough for a program outside the repository: every public header is there, and nothing else;
# each compiles alone; and programs that train sharded and that use every public function build with CMake and with
# pkg-config. Run from the repository root; TORCH_DIR says where LibTorch is.
#
#   COMPILERS="g++ clang++" tests/install_test.sh    with each of these, and every header alone; default: g++, and every
#                                                    third header alone, others for each number of commits
set -euo pipefail
export LC_ALL=C  # one order of names

read -ra compilers <<< "${COMPILERS:-g++}"
headers_of=3  # one in so many is compiled alone
[[ -z ${COMPILERS:-} ]] || headers_of=1
readonly PUBLIC_LAYERS=(checkpoint device_mesh dtensor experts fully_shard optim tensor_parallel)
# Exported as their classes are.
readonly PRIVATE_MEMBERS="fsdp::DeviceMesh::DeviceMesh
fsdp::FSDPModule::for_each_unit
fsdp::GradScaler::is_finite_everywhere
fsdp::GradScaler::unscale_gradients
fsdp::ModulePath::ModulePath
fsdp::Muon::check_groups
fsdp::MuonWithAdamW::check_groups
fsdp::MuonWithAdamW::step_adamw_groups
fsdp::SaveHandle::SaveHandle"
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

# Runs the programs of folder $1.
expect_programs_run() {
  local folder
  folder=$(mktemp -d "$work/run.XXXX")
  expect_sharded_step "$1/consumer"
  expect_equal "$(timeout 60 "$1/every_function" "$folder")" "every function" "$1/every_function"
}

# Prints pkg-config's answer to $1 about the library.
flags_for() { PKG_CONFIG_PATH=$work/prefix/lib/pkgconfig pkg-config "$1" fully_shard; }

# Builds the programs with compiler $1 into folder $2.
build_with_cmake() {
  cmake -S "$work/consumer" -B "$2" -DCMAKE_CXX_COMPILER="$1" -DCMAKE_PREFIX_PATH="$work/prefix" > "$2.log" &&
    cmake --build "$2" >> "$2.log" || fail "the programs do not build with CMake and $1: $(cat "$2.log")"
}

build_with_pkg_config() {
  local program
  mkdir -p "$2"
  for program in consumer every_function; do
    "$1" "$work/consumer/$program.cc" -o "$2/$program" $(flags_for --cflags) $(flags_for --libs) ||
      fail "$program does not build with pkg-config and $1"
  done
}

# The headers below folder $1 that layers' top folders have.
headers_in() { (cd "$1" && find "${PUBLIC_LAYERS[@]}" -maxdepth 1 -name '*.h' | sort); }

# A public header is one in a layer's top folder; nothing else is installed.
expect_public_headers() {
  expect_equal "$(cd "$work/prefix/include/fsdp" && find . -type f | sed 's|^\./||' | sort)" "$(headers_in .)" \
    "the installed headers"
  expect_equal "$(ls "$work/prefix/include")" fsdp "the folders of headers"
}

# The installed headers, or a third of them, need nothing before them, with compiler $1.
compile_headers() {
  headers_in "$work/prefix/include/fsdp" | awk -v every="$headers_of" -v first="$(git rev-list --count HEAD 2> /dev/null || echo 0)" \
    '(NR + first) % every == 0' | xargs -P "$(nproc)" -I {} \
    sh -c "echo '#include \"{}\"' | $1 $(flags_for --cflags) -Wall -Wextra -Werror -fsyntax-only -x c++ - || exit 255" ||
    fail "a header does not compile alone with $1"
}

# Compiles the code $2, which includes fully_shard.h, with compiler $1; warnings are errors.
compiles() {
  printf '#include "fully_shard/fully_shard.h"\n%s\n' "$2" |
    "$1" $(flags_for --cflags) -Werror -fsyntax-only -x c++ - 2> "$work/compiler_errors"
}

# Compiler $1 refuses the code $2 with words that hold $3.
expect_refused() {
  if compiles "$1" "$2"; then fail "$1 compiles $2"; fi
  grep --quiet "$3" "$work/compiler_errors" || fail "$1 does not say \"$3\" of $2: $(cat "$work/compiler_errors")"
}

# A number where a bool is wanted is refused by a text that says what to write, with compiler $1.
expect_numbers_of_ranks_refused() {
  local written
  for written in "fsdp::FullyShardOptions options{.reshard_after_forward = 4};" \
    "void set(fsdp::FSDPModule unit) { unit.set_reshard_after_forward(4); }" "fsdp::ReshardAfterForward after(4u);"; do
    expect_refused "$1" "$written" "a number of ranks is ReshardAfterForward::to_world(n)"
  done
  compiles "$1" "fsdp::ReshardAfterForward after(true);" || fail "$1 refuses a bool"
}

# A guard that no variable holds ends where it begins: compiler $1 warns of it.
expect_dropped_guards_told() {
  expect_refused "$1" "void f(const fsdp::FSDPModule& unit) { fsdp::NoSyncGuard{unit}; }" nodiscard
  compiles "$1" "void f(const fsdp::FSDPModule& unit) { fsdp::NoSyncGuard guard{unit}; }" || fail "$1 refuses a guard that is held"
}

# fully_shard.h brings all others of its folder.
expect_umbrella() {
  local brought
  brought=$(echo '#include "fully_shard/fully_shard.h"' | g++ $(flags_for --cflags) -MM -x c++ - | tr ' ' '\n' |
    sed -n 's|.*/include/fsdp/\(fully_shard/.*\)|\1|p' | sort)
  expect_equal "$brought" "$(headers_in . | grep '^fully_shard/' | grep -v '/fully_shard.h$')" "what fully_shard/fully_shard.h includes of its folder"
}

# The library carries the version: in its file's name, and the part that says which programs it fits in its soname.
expect_version() {
  local version soname
  version=$(tools/version)
  soname=libfully_shard.so.${version%.*}
  expect_equal "$(readelf -d "$work/prefix/lib/libfully_shard.so" | sed -n 's/.*soname: \[\(.*\)\]/\1/p')" "$soname" "the soname"
  expect_equal "$(basename "$(realpath "$work/prefix/lib/$soname")")" "libfully_shard.so.$version" "the library's file"
}

# Of ours the library exports what the public headers declare, and nothing else: functions that every_function.cc uses. Those
# of internal are what templates of public headers call, so it uses them too; private members nobody can.
expect_exports() {
  local exported used
  nm -DC --defined-only "$work/prefix/lib/libfully_shard.so" > "$work/exported"
  exported=$(sed -n 's/^[0-9a-f]* T \(fsdp::.*\)/\1/p' "$work/exported" | sort -u)
  used=$(nm -uC "$1/every_function" | sed -n 's/^ *U \(fsdp::.*\)/\1/p' | sort -u)
  [[ $(wc -l <<< "$used") -gt 150 ]] || fail "every_function uses only: $used"
  expect_equal "$(comm -23 <(echo "$exported") <(echo "$used") | sed 's/(.*//')" "$PRIVATE_MEMBERS" \
    "exported functions that tests/consumer/every_function.cc does not use"
  expect_equal "$(grep -E ' [VWuB] ((vtable|typeinfo|typeinfo name) for )?fsdp::internal[^ ]*(\(|$)' "$work/exported" || true)" "" "exported internals"
}

# CMake's package takes no other LibTorch than it was built against.
expect_other_torch_refused() {
  mkdir "$work/other_torch"
  echo "1.0.0" > "$work/other_torch/build-version"
  if TORCH_DIR=$work/other_torch cmake -S "$work/consumer" -B "$work/refused" -DCMAKE_PREFIX_PATH="$work/prefix" \
    > "$work/refused.log" 2>&1; then
    fail "CMake accepted a LibTorch of another version"
  fi
  grep -q "there is 1.0.0 in" "$work/refused.log" || fail "CMake does not name the other version: $(cat "$work/refused.log")"
}

tools/install "$work/built"
mv "$work/built" "$work/prefix"  # nothing in it may refer to where it was installed
cp -r tests/consumer "$work/consumer"

expect_public_headers
expect_umbrella
expect_version
for compiler in "${compilers[@]}"; do
  build_with_cmake "$compiler" "$work/cmake-$compiler" & building=$!
  build_with_pkg_config "$compiler" "$work/pkg-config-$compiler"
  wait "$building"
  compile_headers "$compiler"
  expect_numbers_of_ranks_refused "$compiler"
  expect_dropped_guards_told "$compiler"
  expect_programs_run "$work/cmake-$compiler"
  expect_programs_run "$work/pkg-config-$compiler"
done
expect_exports "$work/cmake-${compilers[0]}"
expect_other_torch_refused
