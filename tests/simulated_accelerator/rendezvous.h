// The place where the ranks of one collective meet. It is done for all of them by the
// host that forces it first, once every rank has issued its part and all that the parts
// wait for has run. Held by the machine's lock.
#pragma once

#include "tests/simulated_accelerator/clock.h"

#include <cstddef>
#include <functional>
#include <utility>
#include <vector>

namespace fsdp::testing::simulated {

// The memory that one rank brings. Who has no output receives nothing.
struct Operand {
  const char* input = nullptr;
  size_t input_bytes = 0;
  char* output = nullptr;
  size_t output_bytes = 0;
  std::vector<size_t> input_splits = {};  // bytes for each rank, of an all-to-all
};

using Operands = std::vector<Operand>;  // by rank
using Exchange = std::function<void(const Operands&)>;

class Rendezvous {
 public:
  Rendezvous(size_t expected, Operands operands, Exchange exchange)
      : expected_(expected), operands_(std::move(operands)), exchange_(std::move(exchange)) {}

  void bring(size_t rank, const Operand& operand) { operands_.at(rank) = operand; }
  void arrive(Position part) { parts_.push_back(part); }

  // Items of the ranks' queues that have come so far.
  const std::vector<Position>& parts() const { return parts_; }
  size_t expected() const { return expected_; }
  bool is_complete() const { return parts_.size() == expected_; }
  bool is_done() const { return stage_ == Stage::kDone; }

  void run() {
    stage_ = Stage::kDone;
    exchange_(operands_);
  }

 private:
  enum class Stage { kOpen, kDone };

  size_t expected_;  // ranks that take part
  Operands operands_;
  Exchange exchange_;
  std::vector<Position> parts_;
  Stage stage_ = Stage::kOpen;
};

}  // namespace fsdp::testing::simulated
