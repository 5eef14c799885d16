#include "fully_shard/params/tensor_parallel_terms.h"

#include "dtensor/redistribute/grad_placement.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "fully_shard/transport/in_dtype.h"

#include <algorithm>

namespace fsdp::internal {

void TensorParallelTerms::keep(int64_t index, const at::Tensor& gradient, at::ScalarType dtype) {
  const auto own = in_dtype(local_of(gradient), dtype);
  for (auto& each : terms_) {
    if (each.index == index) return void(local_of(each.gradient).add_(own));
  }
  accounts_.add(&Counters::gradient_bytes, static_cast<int64_t>(own.nbytes()));
  terms_.push_back({index, make_dtensor(own, spec_of(gradient))});
}

bool TensorParallelTerms::has(int64_t index) const {
  return std::any_of(terms_.begin(), terms_.end(),
                     [index](const Term& each) { return each.index == index; });
}

std::vector<std::pair<int64_t, at::Tensor>> TensorParallelTerms::take_sums() {
  std::vector<at::Tensor> gradients;
  for (const auto& each : terms_) gradients.push_back(each.gradient);
  const auto sums = sum_terms(gradients);
  std::vector<std::pair<int64_t, at::Tensor>> taken;
  for (size_t i = 0; i < terms_.size(); ++i) taken.emplace_back(terms_[i].index, sums[i]);
  drop();
  return taken;
}

void TensorParallelTerms::drop() {
  for (const auto& [index, gradient] : std::exchange(terms_, {})) {
    accounts_.add(&Counters::gradient_bytes, -static_cast<int64_t>(local_of(gradient).nbytes()));
  }
}

}  // namespace fsdp::internal
