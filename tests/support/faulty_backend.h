// A process group whose collectives go wrong on request, over a real one.
//
//   auto fault = std::make_shared<Fault>(Fault{.kind = Fault::Kind::kError, .at = 3});
//   inject_fault(mesh.group(0), fault);  // its fourth collective throws
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <memory>

namespace c10d {
class ProcessGroup;
}

namespace fsdp::testing {

// Of one rank; several groups may share it, and then count together. Of messages, those
// to the next rank count as collectives.
struct Fault {
  enum class Kind { kNone, kError, kDelay, kDeath };
  Kind kind = Kind::kNone;
  int64_t at = -1;                       // which collective: 0 is the first one issued
  int64_t issued = 0;                    // so far
  std::chrono::milliseconds delay{200};  // of kDelay
};

// From now on the CPU collectives of `group` pass through `fault`, and time out after
// `timeout`. Local.
void inject_fault(const c10::intrusive_ptr<c10d::ProcessGroup>& group, std::shared_ptr<Fault> fault,
                  std::chrono::milliseconds timeout);

}  // namespace fsdp::testing
