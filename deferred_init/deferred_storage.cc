#include "deferred_init/deferred_storage.h"

#include "dtensor/tensor/value_hash.h"
#include "on_demand/gate_key.h"
#include "on_demand/raw_access.h"

#include <utility>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace fsdp::internal {
namespace {

constexpr const char* kNoValues =
    "a tensor of fsdp::deferred_init has no values yet, so its memory can not be read or written "
    "past operators (data_ptr, accessor). Build it by operators, or of "
    "torch::from_blob(...).clone(), or call fsdp::materialize first";

c10::DataPtr memory_of(const at::Tensor& raw) {
  if (!raw.defined()) return {nullptr, c10::Device(c10::kMeta)};
  const auto release = [](void* tensor) { delete static_cast<at::Tensor*>(tensor); };
  return {raw.mutable_data_ptr(), new at::Tensor(raw), release, c10::Device(c10::kMeta)};
}

}  // namespace

DeferredStorage::DeferredStorage(std::shared_ptr<Tape> tape, int64_t value, const at::Tensor& raw)
    : c10::StorageImpl(use_byte_size_t(), tape->nbytes(value), memory_of(raw), nullptr,
                       /*resizable=*/false),
      tape_(std::move(tape)),
      value_(value) {
  if (!raw.defined()) forbid_raw_access();
}

void DeferredStorage::forbid_raw_access() {
  forbids_raw_access_ = true;
  refuse_raw_access(*this, kNoValues);
}

void DeferredStorage::begin_operator() {
  if (forbids_raw_access_) allow_raw_access(*this);
}

void DeferredStorage::end_operator() {
  if (forbids_raw_access_) refuse_raw_access_again(*this, [] { return kNoValues; });
}

DeferredTensor deferred_tensor(const at::Tensor& tensor) {
  return {.value = DeferredStorage::of(tensor)->value(),
          .sizes = tensor.sizes().vec(),
          .strides = tensor.strides().vec(),
          .offset = tensor.storage_offset(),
          .dtype = tensor.scalar_type()};
}

DeferredTensor defer(const at::Tensor& tensor, const std::shared_ptr<Tape>& tape,
                     const at::Tensor& raw) {
  auto* const impl = tensor.unsafeGetTensorImpl();
  const auto nbytes = static_cast<int64_t>(impl->unsafe_storage().nbytes());
  auto storage = c10::make_intrusive<DeferredStorage>(tape, tape->new_value(nbytes), raw);
  const auto deferred = c10::make_intrusive<c10::TensorImpl>(
      c10::Storage(c10::intrusive_ptr<c10::StorageImpl>(std::move(storage))),
      impl->key_set().add(kGateKey), impl->dtype());
  deferred->set_sizes_and_strides(impl->sizes(), impl->strides(), impl->storage_offset());
  impl->shallow_copy_from(deferred);
  return deferred_tensor(tensor);
}

uint64_t fingerprint_of(const at::Tensor& tensor) {
  const auto* const storage = DeferredStorage::of(tensor);
  const Tape& tape = *storage->tape();
  uint64_t hash = 0;
  for (const int64_t index : tape.dependencies().needed_for({storage->value()}, tape.size())) {
    const Step& step = tape.step(index);
    const auto& name = step.op.schema().name();
    hash = XXH3_64bits_withSeed(name.data(), name.size(), hash);
    if (step.generator_state.defined()) hash = hash_of_values(step.generator_state, hash);
  }
  return hash;
}

}  // namespace fsdp::internal
