// Where the two sides of a running program differ first.
//
//   SideComparison comparison(program, rank, sharded, plain);
//   comparison.set_place("action 0");
//   ...
//   comparison.compare_gradients();
//   if (comparison.difference()) ...
#pragma once

#include "tests/fully_shard/random_programs/random_program.h"
#include "tests/fully_shard/random_programs/sharded_program.h"
#include "tests/fully_shard/random_programs/unsharded_program.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace fsdp::testing {

// To the bit, but that any NaN is as good as another: programs may diverge.
bool is_same(const at::Tensor& a, const at::Tensor& b);

// Values of tensor-parallel models are compared whole, and may differ by rounding.
// Collective for those, else local.
class SideComparison {
 public:
  // All outlive it.
  SideComparison(const Program& program, int64_t rank, const ShardedProgram& sharded,
                 const UnshardedProgram& plain)
      : program_(program), rank_(rank), sharded_(sharded), plain_(plain) {}

  // What differs from now on differs there; empty: nowhere in particular.
  void set_place(std::string place) { place_ = std::move(place); }
  void differ(const std::string& what);
  void compare(const std::string& what, const at::Tensor& found, const at::Tensor& expected);
  void compare_gradients();
  void compare_parameters(const char* when);
  const std::optional<std::string>& difference() const { return difference_; }

 private:
  at::Tensor own_part(int id, const at::Tensor& whole) const;
  void check_home(int id, const std::string& what, const at::Tensor& gradient);
  void compare_shard(int id, const std::string& what, const at::Tensor& actual,
                     const at::Tensor& expected, const at::Tensor& bound);

  const Program& program_;
  int64_t rank_;
  const ShardedProgram& sharded_;
  const UnshardedProgram& plain_;
  std::string place_;
  std::optional<std::string> difference_;
};

}  // namespace fsdp::testing
