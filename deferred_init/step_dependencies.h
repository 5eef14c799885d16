// Which steps of a tape must run, and in what order, for a value to be what it was at
// some point of the tape. Values and steps are numbers; no torch header.
//
//   StepDependencies steps;
//   steps.add({}, {0});        // step 0 makes value 0
//   steps.add({}, {1});        // step 1 makes value 1
//   steps.add({0, 1}, {0});    // step 2 changes value 0 by value 1
//   steps.needed_for({1}, 3);  // {1}
//   steps.needed_for({0}, 3);  // {0, 1, 2}
#pragma once

#include <cstdint>
#include <vector>

namespace fsdp::internal {

class StepDependencies {
 public:
  // The next step. What it changes in place is both read and written.
  void add(std::vector<int64_t> reads, const std::vector<int64_t>& writes);
  int64_t size() const { return static_cast<int64_t>(reads_.size()); }

  // The steps before step `before` without which one of `values` would be another there,
  // in the order of the tape. Time: of the steps that it returns, and their reads.
  std::vector<int64_t> needed_for(const std::vector<int64_t>& values, int64_t before) const;

 private:
  std::vector<std::vector<int64_t>> reads_;    // by step
  std::vector<std::vector<int64_t>> writers_;  // by value: steps, ascending
};

}  // namespace fsdp::internal
