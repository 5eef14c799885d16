#include "dtensor/dispatch/gathered_view.h"

#include "dtensor/dispatch/local_tensors.h"
#include "dtensor/dtensor.h"
#include "dtensor/redistribute/comm_listener.h"
#include "dtensor/redistribute/differentiable.h"
#include "dtensor/redistribute/redistribute.h"
#include "dtensor/tensor/dtensor_impl.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <string>
#include <utility>

namespace fsdp::internal {
namespace {

// Which elements of `copy` are those that `view`, over the same memory, shows.
at::Tensor shown_in(const at::Tensor& copy, const at::Tensor& view) {
  if (view.scalar_type() != copy.scalar_type()) return at::ones_like(copy, c10::kBool);
  const auto elements = static_cast<int64_t>(copy.storage().nbytes() / copy.element_size());
  const at::Tensor is_shown = at::zeros({elements}, copy.options().dtype(c10::kBool));
  is_shown.as_strided(view.sizes(), view.strides(), view.storage_offset()).fill_(true);
  return is_shown.as_strided(copy.sizes(), copy.strides(), copy.storage_offset());
}

// Of a parameter: which is written through its member.
class GatheredParameterView final : public DTensorOwner {
 public:
  explicit GatheredParameterView(std::string parameter) : parameter_(std::move(parameter)) {}

  void before_write(const at::Tensor& dtensor) override {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false, "A view of shape ", dtensor.sizes(), " of parameter '", parameter_,
        "' can not be written: the tensor that it was taken of is cut across ranks where the view "
        "changes it, so the view is a gathered copy. Write to a view of the member that model code "
        "computes with, or while a SummonFullParams shows whole parameters (rank ",
        spec_of(dtensor).mesh().rank(), ")");
  }
  void before_set_data(const at::Tensor&, const at::Tensor&) override {}
  at::Tensor substitute(const at::Tensor&) override { return {}; }

 private:
  std::string parameter_;
};

// Operators on `tensor` run through all layers above autograd, whoever calls, and below
// autograd.
class ThroughAllLayers {
 public:
  explicit ThroughAllLayers(const at::Tensor& tensor)
      : guard_(before().included_, (before().excluded_ - tensor.key_set()) |
                                       c10::autograd_dispatch_keyset_with_ADInplaceOrView) {}

 private:
  static c10::impl::LocalDispatchKeySet before() { return c10::impl::tls_local_dispatch_key_set(); }

  c10::impl::ForceDispatchKeyGuard guard_;
};

// Of one gathered copy, and the views of it. The base is read and written by operators,
// since layers above may have something to do with it first.
class GatheredView final : public DTensorOwner {
 public:
  GatheredView(const at::Tensor& base, const at::Tensor& copy)
      : base_(make_dtensor_view(base, local_of(base), spec_of(base))),
        copy_(local_of(copy)),
        spec_(spec_of(copy)),
        version_(version_of_base()) {}

  bool shows_a_copy() const override { return true; }
  bool hears_end_of_write() const override { return true; }

  // Collective where the base was written since it was gathered, as the DTensor that it
  // is: by operators, which are the same on all ranks.
  void before_read(const at::Tensor&) override {
    if (version_of_base() != version_) gather_again();
  }

  // Collective: what is not seen to have changed may have, all the same.
  void before_write(const at::Tensor&) override {
    tell_write(base_);
    gather_again();
  }

  // Nothing but what the view shows: other copies of the base may show the rest.
  void after_write(const at::Tensor& view) override {
    const ThroughAllLayers layers(base_);
    const at::Tensor now = base_.clone();
    const at::Tensor is_shown = own_part(shown_in(copy_, local_of(view)));
    const at::Tensor becomes = at::where(is_shown, own_part(copy_), local_of(now));
    base_.copy_(make_dtensor(becomes, spec_of(base_)));
  }

  void before_set_data(const at::Tensor&, const at::Tensor&) override {}
  at::Tensor substitute(const at::Tensor&) override { return {}; }

 private:
  // Counted by operators on the base and on its views.
  uint32_t version_of_base() const {
    return base_.is_inference() ? 0 : static_cast<uint32_t>(base_._version());
  }

  void gather_again() {
    const ThroughAllLayers layers(base_);
    version_ = version_of_base();
    const at::Tensor now = base_.clone();
    copy_.copy_(moved_part(now, spec_.placements()));
  }

  // Local: from whole to cut.
  at::Tensor own_part(const at::Tensor& whole) const {
    return redistribute_local(whole, spec_, spec_of(base_).placements());
  }

  at::Tensor base_;   // without its graph, which may hold the view
  at::Tensor copy_;   // whole where the base is cut
  DTensorSpec spec_;  // of the copy
  uint32_t version_;  // of the base that the copy shows
};

c10::intrusive_ptr<DTensorOwner> owner_of_view(const at::Tensor& base, const at::Tensor& copy) {
  const auto* const owner = owner_of(base);
  const auto* const name = owner == nullptr ? nullptr : owner->parameter_name();
  if (name != nullptr) return c10::make_intrusive<GatheredParameterView>(*name);
  return c10::make_intrusive<GatheredView>(base, copy);
}

// Views of a tensor share its version counter.
at::Tensor counted_with(const at::Tensor& view, const at::Tensor& base) {
  if (!is_dtensor(view) && !view.is_inference())
    view.unsafeGetTensorImpl()->set_version_counter(base.unsafeGetTensorImpl()->version_counter());
  return view;
}

}  // namespace

at::Tensor gathered_for_view(const at::Tensor& self, const std::vector<Placement>& to) {
  // Forward had the value whole, and an operator took a part of it, so its gradient comes
  // cut: it goes where the value lay.
  const CommCauseScope cause(inside_backward() ? CommCause::kGradient : CommCause::kWhole);
  const at::Tensor copy = redistribute_dtensor(self, to);
  // With the keys of `self`: autograd takes views of it, in inference mode too.
  const at::Tensor shown = make_dtensor_view(self, local_of(copy), spec_of(copy));
  set_owner(shown, owner_of_view(self, copy));
  set_style(shown, {});
  return shown;
}

bool is_gathered_view(const at::Tensor& dtensor) {
  return dynamic_cast<const GatheredView*>(owner_of(dtensor)) != nullptr;
}

bool view_of_member(OperatorCall& call, const at::Tensor& self) {
  auto* const owner = owner_of(self);
  const at::Tensor member = owner == nullptr ? at::Tensor() : owner->substitute(self);
  if (!member.defined()) return false;
  owner->before_whole_read(self);
  call.argument(0) = member;
  owner->while_readable([&] { call.run_in_place(); });
  wrap_results(call, [&](const at::Tensor& view, size_t) { return counted_with(view, member); });
  return true;
}

}  // namespace fsdp::internal
