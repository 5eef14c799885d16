// What DTensors send between ranks, and why: for reading, for tests, and for forbidding
// what no plan asked for.
//
//   fsdp::CommunicationLog log;
//   loss(model->forward(tokens)).backward();
//   std::cout << log.text();
//
//   fsdp::RedistributionPolicy policy(fsdp::Redistribution::kExplicit);
//   model->forward(tokens);       // throws where an operator would move data on its own
//
// Both are of the thread that made them and of the backwards that it starts, which on
// devices run on threads of autograd's.
// LibTorch's profilers see each as a range, too: fully_shard/profile.h.
// What fully_shard sends for units is not a DTensor's: fsdp::counters() has it.
#pragma once

#include "device_mesh/api.h"
#include "dtensor/placement.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace fsdp {

enum class CommunicationCause {
  kRule,      // an operator needs an operand elsewhere
  kExchange,  // an operator sends a little instead: the statistics of a cut softmax
  kStyle,     // a plan asks for it
  kGradient,  // a gradient goes where its value, or its parameter, lies
  kBoundary,  // a plain tensor takes the value of a DTensor
  kRequest,   // redistribute(), full_tensor(), item() or equal() was called
};

// One collective, in the order of issue.
struct Communication {
  std::string operator_name;   // "aten::mm"; empty outside of operators
  std::string collective;      // "all-gather", "all-reduce", "reduce-scatter", "all-to-all"
  std::string mesh_dim;        // "tp"; the index where dimensions have no names
  Placement from, to;          // along that dimension
  std::vector<int64_t> shape;  // of this rank's part without the cut along it
  int64_t bytes;               // that this rank gives to the collective, padded
  CommunicationCause cause;
  bool in_backward;
};

// "all-reduce over tp, Partial(sum) -> Replicate() of [4, 8], 128 bytes: aten::addmm,
// style, forward"
FSDP_API std::string to_string(const Communication& communication);

// Collects what DTensors of this thread and its backwards send while it lives. Nests:
// each has all. Local.
class [[nodiscard]] FSDP_API CommunicationLog {
 public:
  [[nodiscard]] CommunicationLog();
  ~CommunicationLog();
  CommunicationLog(const CommunicationLog&) = delete;
  CommunicationLog& operator=(const CommunicationLog&) = delete;

  const std::vector<Communication>& entries() const;
  int64_t bytes() const;  // of all entries
  void clear();
  // A line for each entry, then the totals by cause.
  std::string text() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

enum class Redistribution {
  kAllow,
  kExplicit,  // only styles, gradients, requests, and what operators exchange
};

// While it lives, DTensors of this thread and its backwards move data only as `allowed`
// says; what else would move throws ValueError instead, on all ranks alike, and tells
// what and why. Nests: the strictest counts. Local.
class [[nodiscard]] FSDP_API RedistributionPolicy {
 public:
  [[nodiscard]] explicit RedistributionPolicy(Redistribution allowed);
  ~RedistributionPolicy();
  RedistributionPolicy(const RedistributionPolicy&) = delete;
  RedistributionPolicy& operator=(const RedistributionPolicy&) = delete;

 private:
  struct Guard;
  std::unique_ptr<Guard> guard_;  // null: nothing is forbidden
};

}  // namespace fsdp
