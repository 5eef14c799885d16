#include "dtensor/internal/gathered_view.h"

#include "dtensor/dtensor.h"
#include "dtensor/internal/dtensor_impl.h"
#include "dtensor/internal/note_redistribution.h"
#include "dtensor/internal/redistribute.h"
#include "dtensor/internal/wrap_results.h"

#include <c10/util/Exception.h>

#include <string>
#include <utility>

namespace fsdp::internal {
namespace {

class GatheredView final : public DTensorOwner {
 public:
  explicit GatheredView(std::string parameter) : parameter_(std::move(parameter)) {}

  // Of what `base` is, or is a view of.
  static c10::intrusive_ptr<DTensorOwner> of(const at::Tensor& base) {
    static const auto& nameless =
        *new c10::intrusive_ptr<DTensorOwner>(c10::make_intrusive<GatheredView>(""));
    const auto* const owner = owner_of(base);
    const auto* const name = owner == nullptr ? nullptr : owner->parameter_name();
    if (name == nullptr) return nameless;
    return c10::make_intrusive<GatheredView>(*name);
  }

  void before_write(const at::Tensor& dtensor) override {
    const bool of_parameter = !parameter_.empty();
    TORCH_CHECK_NOT_IMPLEMENTED(
        false, "A view of shape ", dtensor.sizes(), of_parameter ? " of parameter '" : "",
        parameter_, of_parameter ? "'" : "",
        " can not be written: the tensor that it was taken of is cut across ranks where the "
        "view changes it, so the view is a gathered copy. ",
        of_parameter ? "Write to a view of the member that model code computes with, or while a "
                       "SummonFullParams shows whole parameters (rank "
                     : "Write to the tensor itself, or call "
                       ".redistribute({Replicate()}) on it first (collective; rank ",
        spec_of(dtensor).mesh().rank(), ")");
  }
  void before_set_data(const at::Tensor&, const at::Tensor&) override {}
  at::Tensor substitute(const at::Tensor&) override { return {}; }

 private:
  std::string parameter_;  // empty for none
};

// Views of a tensor share its version counter.
at::Tensor counted_with(const at::Tensor& view, const at::Tensor& base) {
  if (!is_dtensor(view) && !view.is_inference())
    view.unsafeGetTensorImpl()->set_version_counter(base.unsafeGetTensorImpl()->version_counter());
  return view;
}

}  // namespace

at::Tensor gathered_for_view(const OperatorCall& call, const at::Tensor& self,
                             const std::vector<Placement>& to) {
  const DTensorSpec& from = spec_of(self);
  if (!must_move(from, to)) return self;
  note_redistribution(call, 0, from, to, NotedRedistribution::Cause::kNoRule);
  const at::Tensor copy = redistribute_dtensor(self, to);
  // With the keys of `self`: autograd takes views of it, in inference mode too.
  const at::Tensor shown = make_dtensor_view(self, local_of(copy), spec_of(copy));
  set_owner(shown, GatheredView::of(self));
  set_style(shown, {});
  return shown;
}

bool view_of_member(OperatorCall& call, const at::Tensor& self) {
  auto* const owner = owner_of(self);
  const at::Tensor member = owner == nullptr ? at::Tensor() : owner->substitute(self);
  if (!member.defined()) return false;
  owner->before_whole_read(self);
  call.argument(0) = member;
  call.run_in_place();
  wrap_results(call, [&](const at::Tensor& view, size_t) { return counted_with(view, member); });
  return true;
}

}  // namespace fsdp::internal
