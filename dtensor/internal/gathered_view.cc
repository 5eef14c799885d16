#include "dtensor/internal/gathered_view.h"

#include "dtensor/internal/dtensor_impl.h"
#include "dtensor/internal/note_redistribution.h"
#include "dtensor/internal/redistribute.h"

#include <c10/util/Exception.h>

namespace fsdp::internal {
namespace {

// One for all: what it guards has no state.
class GatheredView final : public DTensorOwner {
 public:
  static const c10::intrusive_ptr<DTensorOwner>& instance() {
    static const auto& instance =
        *new c10::intrusive_ptr<DTensorOwner>(c10::make_intrusive<GatheredView>());
    return instance;
  }

  void before_write(const at::Tensor& dtensor) override {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false, "A view of shape ", dtensor.sizes(),
        " can not be written: the tensor that it was taken of is cut across ranks where the "
        "view changes it, so the view is a gathered copy. Write to the tensor itself, or call "
        ".redistribute({Replicate()}) on it first (collective; rank ",
        spec_of(dtensor).mesh().rank(), ")");
  }
  void before_set_data(const at::Tensor&, const at::Tensor&) override {}
  at::Tensor substitute(const at::Tensor&) override { return {}; }
};

void check_no_entry(const OperatorCall& call, const at::Tensor& self,
                    const std::vector<Placement>& to) {
  if (owner_of(self) == nullptr || is_gathered_view(self)) return;
  const auto& from = spec_of(self).placements();
  for (size_t m = 0; m < from.size(); ++m) {
    const bool stays = from[m] == to[m] || spec_of(self).mesh().size(static_cast<int64_t>(m)) == 1;
    TORCH_CHECK_NOT_IMPLEMENTED(
        stays, call.description(), ": the view changes dimension ", from[m].shard_dim(),
        " of a sharded parameter, which is cut across ranks. Call "
        ".redistribute({Replicate()}) or .full_tensor() first (collective), or work on "
        ".to_local(). What flattens parameters (torch::optim::LBFGS, parameters_to_vector) needs "
        "them replicated.");
  }
}

}  // namespace

at::Tensor gathered_for_view(const OperatorCall& call, const at::Tensor& self,
                             const std::vector<Placement>& to) {
  const DTensorSpec& from = spec_of(self);
  if (!must_move(from, to)) return self;
  check_no_entry(call, self, to);
  note_redistribution(call, 0, from, to, NotedRedistribution::Cause::kNoRule);
  const at::Tensor copy = redistribute_dtensor(self, to);
  return make_dtensor(local_of(copy), spec_of(copy), GatheredView::instance());
}

bool is_gathered_view(const at::Tensor& dtensor) {
  return owner_of(dtensor) == GatheredView::instance().get();
}

}  // namespace fsdp::internal
