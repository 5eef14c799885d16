// Averages of losses of elements: a part divides by its own size, so its average counts
// in proportion to that. Sums would do too, but overflow in half precision.
#include "dtensor/families/parts.h"
#include "dtensor/ways/table.h"

#include <ATen/ExpandUtils.h>
#include <ATen/core/Reduction.h>

namespace fsdp::internal {
namespace {

// An average over `whole` elements, of which this rank has `own`.
struct AveragePart {
  int64_t own, whole;

  bool is_all() const { return own == whole; }
  bool is_empty() const { return own == 0; }
  double share() const { return static_cast<double>(own) / static_cast<double>(whole); }
};

bool is_average(const c10::IValue& reduction) { return reduction.toInt() == at::Reduction::Mean; }

// The average of nothing is not a number, its sum is 0.
void become_sum(c10::IValue& reduction) { reduction = static_cast<int64_t>(at::Reduction::Sum); }

int64_t broadcast_numel(at::IntArrayRef a, at::IntArrayRef b) {
  return c10::multiply_integers(at::infer_size(a, b));
}

// loss(self, target, ...), the reduction in argument `reduction`.
template <size_t reduction>
std::vector<c10::IValue> loss_of_part(OperatorCall& call, const PlacedOnMesh& placed) {
  if (!is_average(call.argument(reduction))) return call.run();
  const AveragePart part{
      .own =
          broadcast_numel(call.argument(0).toTensor().sizes(), call.argument(1).toTensor().sizes()),
      .whole = broadcast_numel(placed.operand(0).shape(), placed.operand(1).shape())};
  if (part.is_empty() && !part.is_all()) become_sum(call.argument(reduction));
  auto results = call.run();
  if (!part.is_all()) results[0] = results[0].toTensor().mul(part.share());
  return results;
}

// loss_backward(grad, self, target, ...), which divides by the size of self.
template <size_t reduction>
std::vector<c10::IValue> loss_backward_of_part(OperatorCall& call, const PlacedOnMesh& placed) {
  if (!is_average(call.argument(reduction))) return call.run();
  const AveragePart part{.own = call.argument(1).toTensor().numel(),
                         .whole = c10::multiply_integers(placed.operand(1).shape())};
  if (!part.is_all()) call.argument(0) = call.argument(0).toTensor().mul(part.share());
  return call.run();
}

}  // namespace

void add_elementwise_loss_parts(PartsTable& table) {
  const auto add = [&table](const char* name, RunOnParts run) {
    table[name] = {ways_table().at(name), run};
  };
  for (const char* name : {"mse_loss.", "smooth_l1_loss.", "huber_loss.", "soft_margin_loss."})
    add(name, loss_of_part<2>);
  add("binary_cross_entropy.", loss_of_part<3>);
  add("binary_cross_entropy_with_logits.", loss_of_part<4>);
  for (const char* name : {"mse_loss_backward.", "smooth_l1_loss_backward.", "huber_loss_backward.",
                           "soft_margin_loss_backward."})
    add(name, loss_backward_of_part<3>);
  add("binary_cross_entropy_backward.", loss_backward_of_part<4>);
}

}  // namespace fsdp::internal
