#include "device_mesh/collectives/backend/abandoned.h"

#include "device_mesh/internal/weak_registry.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>
#include <utility>
#include <vector>

namespace fsdp::internal {
namespace {

struct Abandoned {
  c10::intrusive_ptr<c10d::Work> work;
  std::shared_ptr<const void> memory;
};

}  // namespace

void abandon(const Group& group, Pending& message, std::shared_ptr<const void> memory) {
  static auto& kept =
      *new WeakKeyMap<c10::weak_intrusive_ptr<c10d::ProcessGroup>, std::vector<Abandoned>>();
  auto work = message.release();
  if (!work) return;
  kept.with(group, [&](std::vector<Abandoned>& messages) {
    messages.push_back({std::move(work), std::move(memory)});
  });
}

}  // namespace fsdp::internal
