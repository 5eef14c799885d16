#include "programs/trainer/model/documents.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <tuple>

namespace programs {

Documents documents_of(const at::Tensor& begins) {
  const auto place = at::arange(begins.size(1), begins.options().dtype(at::kLong));
  // Where each token's document begins, which is different for different documents.
  const auto start = std::get<0>(at::cummax(begins.to(at::kLong) * place, 1));
  const auto is_same = start.unsqueeze(2).eq(start.unsqueeze(1));
  const auto is_before = place.unsqueeze(1).ge(place.unsqueeze(0));
  return {place - start, is_same.logical_and(is_before).unsqueeze(1)};
}

}  // namespace programs
