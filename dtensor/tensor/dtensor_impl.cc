#include "dtensor/tensor/dtensor_impl.h"

#include "dtensor/dtensor.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/GradMode.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/TensorOptions.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

namespace fsdp {

bool is_dtensor(const at::Tensor& tensor) {
  return tensor.defined() && tensor.unsafeGetTensorImpl()->key_set().has(internal::kDTensorKey);
}

}  // namespace fsdp

namespace fsdp::internal {
namespace {

// Copied twice into each DTensor, so it is short: two cache lines.
constexpr const char* kNoMemory =
    "A DTensor has no storage of its own: take fsdp::DTensor(t).to_local() or .full_tensor()";

// The storage that a DTensor has shown to who reads tensors by it, as LibTorch's
// torch::save does: one that holds the whole value, where that is at hand.
struct ShownStorage {
  const void* data = nullptr;
  uint32_t version = 0;
  c10::Storage storage = {};
};

bool this_rank_has_all(const at::Tensor& dtensor) {
  const auto& spec = spec_of(dtensor);
  const auto& placements = spec.placements();
  return spec.mesh().size() == 1 ||
         std::all_of(placements.begin(), placements.end(),
                     [](const Placement& placement) { return placement.is_replicate(); });
}

void let_go(void* value) { delete static_cast<at::Tensor*>(value); }

// Of the memory of `value`, which lies as `dtensor` says, and of nothing beside it:
// torch's files hold storages whole.
c10::Storage storage_of(const at::Tensor& value, const at::Tensor& dtensor) {
  const size_t bytes =
      at::detail::computeStorageNbytes(dtensor.sizes(), dtensor.strides(), value.element_size());
  void* const data = const_cast<void*>(value.const_data_ptr());  // NOLINT: it shares memory
  c10::DataPtr memory(data, new at::Tensor(value), let_go, value.device());
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes, std::move(memory),
                      /*allocator=*/nullptr, /*resizable=*/false);
}

bool is_shown(const at::Tensor& dtensor, const ShownStorage& shown) {
  return shown.storage && shown.data == local_of(dtensor).const_data_ptr() &&
         shown.version == local_version_of(dtensor);
}

// Puts the storage of `whole`, the value of `dtensor`, into `shown`.
const c10::Storage* show(const at::Tensor& dtensor, const at::Tensor& whole, ShownStorage& shown) {
  at::Tensor laid_out = whole.detach();
  if (whole.strides() != dtensor.strides() || whole.is_conj() || whole.is_neg()) {
    laid_out = at::empty_strided(dtensor.sizes(), dtensor.strides(), whole.options());
    laid_out.copy_(whole);
  }
  shown = {local_of(dtensor).const_data_ptr(), local_version_of(dtensor),
           storage_of(laid_out, dtensor)};
  return &shown.storage;
}

// Of what this rank holds, if that is all of it, as on a mesh of one rank and where all
// placements are Replicate, kept in `shown`; else null: nothing is gathered, since
// LibTorch comes to an optimizer's states in another order on each rank. The elements
// lie as the DTensor's strides say, from the storage's begin. Good until the DTensor is
// written. Local.
const c10::Storage* whole_storage(const at::Tensor& dtensor, ShownStorage& shown) {
  if (!this_rank_has_all(dtensor)) return nullptr;
  const c10::NoGradGuard no_grad;
  tell_read(dtensor);
  return is_shown(dtensor, shown) ? &shown.storage : show(dtensor, local_of(dtensor), shown);
}

// Lets go of what the metadata owns with the last tensor, even while weak references
// remain: the owner refers to its DTensor weakly, and a plain TensorImpl keeps its
// metadata until the last weak reference is gone.
class DTensorImpl final : public c10::TensorImpl {
 public:
  using c10::TensorImpl::TensorImpl;

  // What Tensor::set_data comes to. A plain tensor's data would turn a DTensor into a
  // plain tensor without a word.
  void shallow_copy_from(const c10::intrusive_ptr<c10::TensorImpl>& impl) override {
    TORCH_CHECK_VALUE(
        impl->key_set().has(kDTensorKey), "set_data on a DTensor of shape ", sizes(),
        " with a plain ", "tensor of shape ", impl->sizes(),
        ": a DTensor's memory belongs to its mesh. Write with "
        "copy_(), which takes this rank's part of a plain tensor of the global shape.");
    c10::TensorImpl::shallow_copy_from(impl);
  }

  // LibTorch's own serialization reads tensors by their storage.
  const c10::Storage& storage() const override {
    const auto self = at::Tensor(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(
        const_cast<DTensorImpl*>(this)));  // NOLINT: a handle of what it is
    const c10::Storage* const whole = whole_storage(self, shown_);
    TORCH_CHECK(whole != nullptr, kNoMemory,
                " (collective). Instead of torch::save(model, ...) or torch::save(optimizer, "
                "...): fsdp::save({.model = model, .optimizer = optimizer}, \"checkpoint\"); on "
                "every rank; or, for LibTorch's own file of the model, torch::save(model, ...) "
                "while an fsdp::SummonFullParams of it lives.");
    return *whole;
  }

  void release_resources() override {
    c10::TensorImpl::release_resources();
    extra_meta_.reset();
    shown_ = {};
  }

 private:
  mutable ShownStorage shown_;
};

// Gives `dtensor` metadata of its own, changed so.
template <class Change>
void change_meta(const at::Tensor& dtensor, const Change& change) {
  auto meta = c10::make_intrusive<DTensorMeta>(meta_of(dtensor));
  change(*meta);
  dtensor.unsafeGetTensorImpl()->set_backend_meta(std::move(meta));
}

DTensorMeta& changed_meta(const at::Tensor& dtensor) {
  return *static_cast<DTensorMeta*>(dtensor.unsafeGetTensorImpl()->get_backend_meta());
}

// What a tensor carries on any device.
c10::DispatchKeySet without_backends(c10::DispatchKeySet keys) {
  return {c10::DispatchKeySet::RAW, keys.raw_repr() & ~c10::full_backend_mask};
}

}  // namespace

NewDTensors& NewDTensors::current() {
  thread_local NewDTensors current;
  return current;
}

at::Tensor make_dtensor(const at::Tensor& local, DTensorSpec spec,
                        c10::intrusive_ptr<DTensorOwner> owner) {
  install_dtensor_kernels();
  // The constructor adds the device's autograd keys (and leaves them out in inference
  // mode).
  auto keys = c10::DispatchKeySet(
      c10::computeDispatchKey(local.scalar_type(), c10::kStrided, local.device()));
  const NewDTensors& made = NewDTensors::current();
  keys = keys.add(kDTensorKey).add(kFirstKey) | made.keys;
  if (owner) keys = keys | owner->extra_keys();
  const bool is_of_parameter = owner && owner->parameter_name() != nullptr;
  auto impl = c10::make_intrusive<DTensorImpl>(keys, local.dtype(), local.device());
  impl->release_storage_and_set_meta_custom_data_ptr_error_msg_(kNoMemory);
  impl->set_sizes_and_strides(spec.shape(), spec.stride());
  impl->set_backend_meta(c10::make_intrusive<DTensorMeta>(
      local, std::move(spec), std::move(owner), DTensorStylePtr(),
      made.from_parameter || is_of_parameter, is_of_parameter ? ScalarHash() : made.scalars));
  return at::Tensor(std::move(impl));
}

at::Tensor make_dtensor_view(const at::Tensor& base, const at::Tensor& local, DTensorSpec spec) {
  auto* const source = base.unsafeGetTensorImpl();
  const DTensorMeta& meta = meta_of(base);
  if (local.scalar_type() != base.scalar_type()) {
    const NewFromParameter origin(meta.from_parameter, meta.scalars);
    at::Tensor view = make_dtensor(local, std::move(spec), meta.owner);
    view.unsafeGetTensorImpl()->set_version_counter(source->version_counter());
    return view;
  }
  auto impl = source->shallow_copy_and_detach(source->version_counter(),
                                              /*allow_tensor_metadata_change=*/true);
  impl->set_sizes_and_strides(spec.shape(), spec.stride());
  impl->set_backend_meta(c10::make_intrusive<DTensorMeta>(local, std::move(spec), meta.owner,
                                                          meta.style, meta.from_parameter,
                                                          meta.scalars, meta.label));
  return at::Tensor(std::move(impl));
}

void become_view(const at::Tensor& dtensor, const at::Tensor& view) {
  const DTensorMeta& becomes = meta_of(view);
  dtensor.unsafeGetTensorImpl()->set_sizes_and_strides(becomes.spec.shape(), becomes.spec.stride());
  change_meta(dtensor, [&](DTensorMeta& meta) {
    meta.local = becomes.local;
    meta.spec = becomes.spec;
    meta.owner = becomes.owner;
  });
}

void replace_local(const at::Tensor& dtensor, const at::Tensor& local) {
  change_meta(dtensor, [&](DTensorMeta& meta) { meta.local = local; });
}

void replace_local(const at::Tensor& dtensor, const at::Tensor& local, c10::DispatchKeySet keys) {
  auto* const impl = dtensor.unsafeGetTensorImpl();
  const auto& meta = meta_of(dtensor);
  const KeysOfNewDTensors all(without_backends(impl->key_set()) | keys);
  const NewFromParameter origin(meta.from_parameter, meta.scalars);
  const at::Tensor becomes = make_dtensor(local, meta.spec, meta.owner);
  set_style(becomes, meta.style);
  set_label(becomes, meta.label);
  impl->shallow_copy_from(becomes.getIntrusivePtr());
}

void set_from_parameter(const at::Tensor& dtensor) { changed_meta(dtensor).from_parameter = true; }

void set_scalar_hash(const at::Tensor& dtensor, const ScalarHash& scalars) {
  DTensorMeta& meta = changed_meta(dtensor);
  if (!meta.is_of_parameter()) meta.scalars = scalars;
}

void set_style(const at::Tensor& dtensor, DTensorStylePtr style) {
  change_meta(dtensor, [&](DTensorMeta& meta) { meta.style = std::move(style); });
}

void set_label(const at::Tensor& dtensor, Label label) {
  changed_meta(dtensor).label = std::move(label);
}

void set_owner(const at::Tensor& dtensor, c10::intrusive_ptr<DTensorOwner> owner) {
  change_meta(dtensor, [&](DTensorMeta& meta) { meta.owner = std::move(owner); });
}

LettingGoOfMeta::~LettingGoOfMeta() {
  auto weak = c10::weak_intrusive_ptr<c10::TensorImpl>::reclaim(impl_);
  const bool dies = weak.expired();
  // Those with strong references have one together. Alone, it means that the tensor is
  // being destroyed as a whole.
  const bool is_kept = weak.weak_use_count() > 1;
  weak.release();
  if (dies && is_kept) impl_->set_backend_meta({});
}

std::string description_of(const at::Tensor& dtensor) {
  const DTensorMeta& meta = meta_of(dtensor);
  if (meta.is_of_parameter()) return meta.owner->description();
  if (meta.label) return *meta.label;
  if (!meta.style) return {};
  return "parameter '" + meta.style->path + "' of tensor-parallel model " +
         std::to_string(meta.style->number_of_model);
}

uint32_t local_version_of(const at::Tensor& tensor) {
  return static_cast<uint32_t>(local_of(tensor)._version());
}

}  // namespace fsdp::internal
