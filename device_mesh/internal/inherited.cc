#include "device_mesh/internal/inherited.h"

#include <c10/util/Exception.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

namespace fsdp::internal {
namespace {

using c10::DebugInfoKind;
using c10::ThreadLocalDebugInfo;

// Which LibTorch itself sets nowhere.
constexpr auto kKind = DebugInfoKind::INFERENCE_CONTEXT;

// Ours last: it lies below the others.
constexpr std::array kKinds = {DebugInfoKind::PROFILER_STATE,
                               DebugInfoKind::PARAM_COMMS_INFO,
                               DebugInfoKind::PRODUCER_INFO,
                               DebugInfoKind::MOBILE_RUNTIME_INFO,
                               DebugInfoKind::TEST_INFO,
                               DebugInfoKind::TEST_INFO_2,
                               kKind};

using Value = std::shared_ptr<std::atomic<void*>>;

struct Values final : c10::DebugInfoBase {
  std::array<Value, kInheritedKinds> of = {};
};

// Somebody else's of that kind hides them.
const Values* current() {
  auto* const info = ThreadLocalDebugInfo::get(kKind);
  return info == nullptr ? nullptr : dynamic_cast<const Values*>(info);
}

struct Info {
  DebugInfoKind kind;
  std::shared_ptr<c10::DebugInfoBase> value;
};

bool is_last(DebugInfoKind kind) {
  if (ThreadLocalDebugInfo::get(kind) == nullptr) return false;
  try {
    ThreadLocalDebugInfo::_peek(kind);
    return true;
  } catch (const c10::Error&) {  // one of another kind was pushed later
    return false;
  }
}

// Takes this thread's infos from it, the last pushed first.
std::vector<Info> take_infos() {
  std::vector<Info> taken;
  while (ThreadLocalDebugInfo::current() != nullptr) {
    const auto* const kind = std::find_if(kKinds.begin(), kKinds.end(), is_last);
    TORCH_INTERNAL_ASSERT(kind != kKinds.end(), "ThreadLocalDebugInfo of a new kind");
    taken.push_back({*kind, ThreadLocalDebugInfo::_pop(*kind)});
  }
  return taken;
}

// Below those of others, which take what they have pushed from the top.
void make_current(std::shared_ptr<Values> values) {
  const bool is_empty = std::none_of(values->of.begin(), values->of.end(),
                                     [](const Value& value) { return value != nullptr; });
  auto infos = take_infos();
  std::erase_if(infos, [](const Info& info) {
    return dynamic_cast<const Values*>(info.value.get()) != nullptr;
  });
  const auto hidden =
      std::find_if(infos.begin(), infos.end(), [](const Info& info) { return info.kind == kKind; });
  if (!is_empty) infos.insert(hidden, {kKind, std::move(values)});
  for (auto info = infos.rbegin(); info != infos.rend(); ++info)
    ThreadLocalDebugInfo::_push(info->kind, std::move(info->value));
}

// Returns what was there before.
Value exchange_current(Inherited which, Value value) {
  const auto* const before = current();
  auto values = before == nullptr ? std::make_shared<Values>() : std::make_shared<Values>(*before);
  auto of_before = std::exchange(values->of.at(static_cast<size_t>(which)), std::move(value));
  make_current(std::move(values));
  return of_before;
}

}  // namespace

void* inherited(Inherited which) {
  const auto* const values = current();
  if (values == nullptr) return nullptr;
  const auto& value = values->of[static_cast<size_t>(which)];
  return value == nullptr ? nullptr : value->load();
}

InheritedScope::InheritedScope(Inherited which, void* value)
    : which_(which),
      value_(std::make_shared<std::atomic<void*>>(value)),
      before_(exchange_current(which, value_)) {}

InheritedScope::~InheritedScope() {
  value_->store(nullptr);
  exchange_current(which_, std::move(before_));
}

}  // namespace fsdp::internal
