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
const auto kKind = DebugInfoKind::INFERENCE_CONTEXT;

// LibTorch does not tell the kind of the info that was pushed last, and from 2.15 on
// anybody can make kinds. An explicit instantiation may name a private member: this one
// hands out a pointer to it.
using KindMember = DebugInfoKind ThreadLocalDebugInfo::*;
KindMember kind_member();
template <KindMember member>
struct HandsOut {
  friend KindMember kind_member() { return member; }
};
template struct HandsOut<&ThreadLocalDebugInfo::kind_>;

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

// Takes this thread's infos from it, the last pushed first.
std::vector<Info> take_infos() {
  std::vector<Info> taken;
  while (const auto last = ThreadLocalDebugInfo::current()) {
    const auto kind = (*last).*kind_member();
    taken.push_back({kind, ThreadLocalDebugInfo::_pop(kind)});
  }
  return taken;
}

Value exchange(Values& values, Inherited which, Value value) {
  return std::exchange(values.of.at(static_cast<size_t>(which)), std::move(value));
}

bool is_empty(const Values& values) {
  return std::all_of(values.of.begin(), values.of.end(), [](const Value& value) {
    return value == nullptr || value->load() == nullptr;
  });
}

// Ours lie below those of others, which take what they have pushed from the top. Returns
// what was there before.
Value exchange_current(Inherited which, const Value& value) {
  auto values = std::make_shared<Values>();
  auto infos = take_infos();
  std::erase_if(infos, [&](const Info& info) {
    const auto* const ours = dynamic_cast<const Values*>(info.value.get());
    if (ours != nullptr) *values = *ours;
    return ours != nullptr;
  });
  auto before = exchange(*values, which, value);
  if (!is_empty(*values)) infos.push_back({kKind, std::move(values)});
  for (auto info = infos.rbegin(); info != infos.rend(); ++info)
    ThreadLocalDebugInfo::_push(info->kind, std::move(info->value));
  return before;
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
  exchange_current(which_, before_);
}

}  // namespace fsdp::internal
