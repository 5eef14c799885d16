// Which rank computes with which tensor. No torch here.
#pragma once

#include "optim/internal/matrices.h"

#include <cstdint>
#include <vector>

namespace fsdp::internal {

// Of the Newton-Schulz iteration, up to a factor: s^2 (2 l + s) for each matrix with a
// shorter side s and a longer side l.
double newton_schulz_cost(const Matrices& matrices);

// Deals out work, so that the ranks with the most have as little as possible: the longest
// first, to the rank that has least so far (Graham, "Bounds on multiprocessing timing
// anomalies", 1969: at most 4/3 of the best). Ties go by position, so all ranks decide
// alike without sending.
class Owners {
 public:
  explicit Owners(int64_t ranks) : loads_(static_cast<size_t>(ranks), 0.0) {}

  // By position in `costs`. What was dealt out before counts.
  std::vector<int64_t> assign(const std::vector<double>& costs);
  // The sum of each rank's costs.
  const std::vector<double>& loads() const { return loads_; }

 private:
  std::vector<double> loads_;
};

}  // namespace fsdp::internal
