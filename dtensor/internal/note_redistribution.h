// Who wants to know of data that moves because an operator needs its operands elsewhere.
#pragma once

#include "dtensor/internal/dtensor_spec.h"

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

namespace fsdp::internal {

class OperatorCall;

struct NotedRedistribution {
  enum class Cause {
    kWay,     // the cheapest way takes the operand there
    kNoRule,  // the operator has no way to run on parts
  };
  std::string operator_name;  // "aten::mm"
  size_t operand;             // among the operator's tensors
  const DTensorSpec& from;
  const std::vector<Placement>& to;
  Cause cause;
};

// While it lives, `listener` hears of every redistribution that operators cause on this
// thread, before it happens, instead of who listened before. Local.
class RedistributionListener {
 public:
  using Listener = std::function<void(const NotedRedistribution&)>;

  explicit RedistributionListener(Listener listener);
  ~RedistributionListener();
  RedistributionListener(const RedistributionListener&) = delete;
  RedistributionListener& operator=(const RedistributionListener&) = delete;

  void hear(const NotedRedistribution& noted) const { listener_(noted); }

 private:
  Listener listener_;
  const RedistributionListener* before_;
};

// Called where an operand that is cut or Partial goes elsewhere.
void note_redistribution(const OperatorCall& call, size_t operand, const DTensorSpec& from,
                         const std::vector<Placement>& to, NotedRedistribution::Cause cause);

}  // namespace fsdp::internal
