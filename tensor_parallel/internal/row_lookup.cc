#include "tensor_parallel/internal/row_lookup.h"

#include "dtensor/dispatch/cut_indices.h"
#include "dtensor/dtensor.h"
#include "dtensor/redistribute/comm_listener.h"
#include "dtensor/redistribute/redistribute.h"
#include "dtensor/tensor/dtensor_impl.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>

namespace fsdp::internal {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Lookup final : torch::CustomClassHolder {
  Lookup(DTensorSpec of, at::Tensor at, int64_t padding, bool scale)
      : table(std::move(of)), indices(std::move(at)), padding_idx(padding), scales_by_freq(scale) {}

  DTensorSpec table;
  at::Tensor indices;  // plain
  int64_t padding_idx;
  bool scales_by_freq;
};
using LookupPtr = c10::intrusive_ptr<Lookup>;

void save(AutogradContext* context, const LookupPtr& lookup) {
  context->saved_data["lookup"] = c10::IValue::make_capsule(lookup);
}
LookupPtr saved(AutogradContext* context) {
  return c10::static_intrusive_pointer_cast<Lookup>(context->saved_data["lookup"].toCapsule());
}

// Of every index, on this rank.
at::Tensor whole_gradient(const at::Tensor& grad) {
  if (!is_dtensor(grad)) return grad;
  const CommCauseScope cause(CommCause::kGradient);
  return whole_value(grad);
}

// This rank's rows; one row more is for the indices of others, and is not added up.
at::Tensor gradient_of_own_rows(const at::Tensor& grad, const Lookup& lookup) {
  const int64_t rows = lookup.table.local_shape()[0];
  const auto cut = cut_indices(lookup.indices, lookup.table, /*dim=*/0);
  const at::Tensor is_out = cut.is_elsewhere.logical_or(lookup.indices.eq(lookup.padding_idx));
  return at::embedding_dense_backward(grad, cut.in_part.masked_fill(is_out, rows), rows + 1,
                                      /*padding_idx=*/rows, lookup.scales_by_freq)
      .narrow(0, 0, rows)
      .contiguous();
}

at::Tensor look_up(const at::Tensor& table, const LookupPtr& lookup);
at::Tensor gradient_of_table(const at::Tensor& grad, const LookupPtr& lookup);

class LookUp : public torch::autograd::Function<LookUp> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& table,
                            const LookupPtr& lookup) {
    save(context, lookup);
    return at::embedding(table, lookup->indices, lookup->padding_idx, lookup->scales_by_freq);
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    return {gradient_of_table(grads[0], saved(context)), at::Tensor()};
  }
};

class GradientOfTable : public torch::autograd::Function<GradientOfTable> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& grad,
                            const LookupPtr& lookup) {
    save(context, lookup);
    const at::Tensor own = gradient_of_own_rows(whole_gradient(grad), *lookup);
    const DTensorSpec& table = lookup->table;
    return make_dtensor(own, table.with_shape(table.shape()));
  }
  // What a change of the result's gradient changes in that of the table; padding has
  // none.
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto lookup = saved(context);
    const at::Tensor rows = look_up(grads[0], lookup);
    const at::Tensor is_padding = lookup->indices.eq(lookup->padding_idx).unsqueeze(-1);
    return {rows.masked_fill(is_padding, 0), at::Tensor()};
  }
};

bool records(const at::Tensor& tensor) {
  return at::GradMode::is_enabled() && tensor.requires_grad();
}

at::Tensor look_up(const at::Tensor& table, const LookupPtr& lookup) {
  if (records(table)) return LookUp::apply(table, lookup);
  return at::embedding(table, lookup->indices, lookup->padding_idx, lookup->scales_by_freq);
}

at::Tensor gradient_of_table(const at::Tensor& grad, const LookupPtr& lookup) {
  return GradientOfTable::apply(grad, lookup);
}

}  // namespace

bool has_cut_rows(const at::Tensor& table, const at::Tensor& indices) {
  if (!is_dtensor(table) || is_dtensor(indices)) return false;
  const DTensorSpec& spec = spec_of(table);
  return spec.mesh().ndim() == 1 && spec.is_cut(0);
}

at::Tensor look_up_rows(const at::Tensor& table, const at::Tensor& indices, int64_t padding_idx,
                        bool scale_grad_by_freq) {
  return look_up(
      table, c10::make_intrusive<Lookup>(spec_of(table), indices, padding_idx, scale_grad_by_freq));
}

}  // namespace fsdp::internal
