// Profilers see an operator's arguments before the gate does: what they read of empty
// parameters must be harmless.
#include "tests/fully_shard/support/bit_equality.h"

#include <ATen/record_function.h>
#include <gtest/gtest.h>

namespace fsdp::testing {
namespace {

thread_local int64_t visited;

template <void (*Visit)(const torch::Tensor&)>
std::unique_ptr<at::ObserverContext> visit_inputs(const at::RecordFunction& call) {
  for (const auto& input : call.inputs()) {
    if (!input.isTensor() || !input.toTensor().defined()) continue;
    ++visited;
    Visit(input.toTensor());
  }
  return nullptr;
}

template <void (*Visit)(const torch::Tensor&)>
Tensors linear_layer_with_callback(const Tensors& w, Random& random) {
  visited = 0;
  const auto handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback(&visit_inputs<Visit>).needsInputs(true));
  auto loss = torch::linear(random({3, 4}), w[0]).pow(2).sum();
  loss.backward();
  at::removeCallback(handle);
  EXPECT_GT(visited, 2);
  return {loss};
}

void read_shape(const torch::Tensor& tensor) {
  EXPECT_GE(tensor.sizes().size() + tensor.strides().size(), 0U);
}
// Throws where the tensor is an empty parameter. RecordFunction logs that and goes on.
void read_data(const torch::Tensor& tensor) { tensor.const_data_ptr(); }

TEST(InterceptionRecordFunction, CallbacksThatReadShapesChangeNothing) {
  for (const int64_t world : {1, 2, 3}) {
    expect_bit_equal({"shapes", shapes({{4, 4}}), linear_layer_with_callback<read_shape>}, world);
  }
}

TEST(InterceptionRecordFunction, CallbacksThatReadDataChangeNothing) {
  for (const int64_t world : {1, 2, 3}) {
    expect_bit_equal({"data", shapes({{4, 4}}), linear_layer_with_callback<read_data>}, world);
  }
}

}  // namespace
}  // namespace fsdp::testing
