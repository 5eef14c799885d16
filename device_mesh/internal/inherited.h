// What a thread refers to while a scope lives, and with it the threads on which autograd
// runs the backwards that it starts: on devices these are others, to which LibTorch hands
// its ThreadLocalDebugInfo. Local.
//
//   const InheritedScope scope(Inherited::kUnitObserver, &observer);
//   ...
//   auto* observer = static_cast<UnitObserver*>(inherited(Inherited::kUnitObserver));
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace fsdp::internal {

enum class Inherited : uint8_t { kCommListener, kUnitObserver };
constexpr size_t kInheritedKinds = 2;

// Null where there is none, and on threads that inherited it from a scope that has ended,
// as a backward that failed may go on there for a while.
void* inherited(Inherited which);

// Scopes of a thread nest among their kind. With a profiler they need not: one may start
// within a scope and stop after it, or the other way round. If other code uses
// INFERENCE_CONTEXT, its info hides ours meanwhile.
class InheritedScope {
 public:
  InheritedScope(Inherited which, void* value);
  ~InheritedScope();
  InheritedScope(const InheritedScope&) = delete;
  InheritedScope& operator=(const InheritedScope&) = delete;

 private:
  Inherited which_;
  std::shared_ptr<std::atomic<void*>> value_, before_;
};

}  // namespace fsdp::internal
