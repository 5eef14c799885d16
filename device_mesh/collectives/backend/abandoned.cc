#include "device_mesh/collectives/backend/abandoned.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace fsdp::internal {
namespace {

struct Abandoned {
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
  c10::intrusive_ptr<c10d::Work> work;
  std::shared_ptr<const void> memory;
};

struct Registry {
  std::mutex mutex;
  std::vector<Abandoned> messages;
};

Registry& registry() {
  static auto& instance = *new Registry();  // leaked: groups may die after static destruction began
  return instance;
}

}  // namespace

void abandon(const Group& group, Pending& message, std::shared_ptr<const void> memory) {
  auto work = message.release();
  if (!work) return;
  std::lock_guard lock(registry().mutex);
  auto& messages = registry().messages;
  std::erase_if(messages, [](const auto& item) { return item.group.expired(); });
  messages.push_back(
      {c10::weak_intrusive_ptr<c10d::ProcessGroup>(group), std::move(work), std::move(memory)});
}

}  // namespace fsdp::internal
