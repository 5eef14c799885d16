#include "fully_shard/units/unit_buffers.h"

#include "dtensor/dtensor.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstddef>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace fsdp::internal {
namespace {

// A buffer that some unit casts. It has its own dtype again whenever it has another one
// than `cast` (Module::to).
struct TakenBuffer {
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor;
  at::ScalarType own, cast;
};

constexpr size_t kFewBuffers = 1024;

// Of all units of the process. Weak pointers keep addresses from being used again.
class TakenBuffers {
 public:
  static TakenBuffers& of_process() {
    static auto& instance = *new TakenBuffers();  // leaked: modules may die very late
    return instance;
  }

  // Looks at all only once they are twice as many.
  void forget_dead() {
    const std::lock_guard lock(mutex_);
    if (taken_.size() < forget_at_) return;
    std::erase_if(taken_, [](const auto& item) { return item.second.tensor.expired(); });
    forget_at_ = std::max(kFewBuffers, 2 * taken_.size());
  }

  // False where a unit has it.
  bool take(const at::Tensor& buffer) {
    const std::lock_guard lock(mutex_);
    const auto dtype = buffer.scalar_type();
    return taken_
        .try_emplace(buffer.unsafeGetTensorImpl(),
                     TakenBuffer{.tensor = decltype(TakenBuffer::tensor)(buffer.getIntrusivePtr()),
                                 .own = dtype,
                                 .cast = dtype})
        .second;
  }

  at::ScalarType own_dtype(const at::Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    const auto found = taken_.find(tensor.unsafeGetTensorImpl());
    const bool is_cast = found != taken_.end() && found->second.cast == tensor.scalar_type();
    return is_cast ? found->second.own : tensor.scalar_type();
  }

  void note_cast(const at::Tensor& buffer, at::ScalarType own, at::ScalarType cast) {
    const std::lock_guard lock(mutex_);
    auto& taken = taken_.at(buffer.unsafeGetTensorImpl());
    taken.own = own;
    taken.cast = cast;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<const c10::TensorImpl*, TakenBuffer> taken_;
  size_t forget_at_ = kFewBuffers;
};

void cast_buffer(const at::Tensor& buffer, std::optional<at::ScalarType> dtype) {
  if (buffer.is_meta()) return;
  const auto own = own_dtype(buffer);
  const auto becomes = dtype.value_or(own);
  if (buffer.scalar_type() != becomes) buffer.set_data(buffer.to(becomes));
  TakenBuffers::of_process().note_cast(buffer, own, becomes);
}

}  // namespace

at::ScalarType own_dtype(const at::Tensor& tensor) {
  return TakenBuffers::of_process().own_dtype(tensor);
}

at::Tensor in_own_dtype(const at::Tensor& tensor) {
  const auto dtype = own_dtype(tensor);
  return tensor.scalar_type() == dtype ? tensor : tensor.detach().to(dtype);
}

void UnitBuffers::take(const std::vector<at::Tensor>& buffers) {
  TakenBuffers::of_process().forget_dead();
  for (const auto& buffer : buffers) {
    if (!at::isFloatingType(buffer.scalar_type()) || is_dtensor(buffer)) continue;
    if (TakenBuffers::of_process().take(buffer)) buffers_.emplace_back(buffer.getIntrusivePtr());
  }
}

void UnitBuffers::cast(std::optional<at::ScalarType> dtype) const {
  const at::NoGradGuard no_grad;
  for (const auto& weak : buffers_) {
    const at::Tensor buffer(weak.lock());
    if (buffer.defined()) cast_buffer(buffer, dtype);
  }
}

}  // namespace fsdp::internal
