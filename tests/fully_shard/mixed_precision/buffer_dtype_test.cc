// MixedPrecisionPolicy::buffer_dtype: what buffers are cast to, in place, and when they
// have their own dtype again. What is saved: tests/checkpoint/buffer_dtype_test.cc.
#include "tests/fully_shard/support/mixed_precision.h"

#include <gtest/gtest.h>

#include <memory>

namespace fsdp::testing {
namespace {

using torch::Tensor;

const MixedPrecisionPolicy kHalved{.param_dtype = at::kBFloat16, .buffer_dtype = at::kBFloat16};

struct NormedImpl : torch::nn::Module {
  NormedImpl() { set_start_values(*this); }
  Tensor forward(const Tensor& x) { return norm(linear(x)); }
  torch::nn::Linear linear = register_module("linear", torch::nn::Linear(4, 6));
  torch::nn::BatchNorm1d norm = register_module("norm", torch::nn::BatchNorm1d(6));
};
TORCH_MODULE(Normed);

class BufferDtype : public Worlds {};

TEST_P(BufferDtype, RunningStatisticsAreThoseOfAModelInThatDtype) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    Normed model, plain;
    const auto mean = model->norm->running_mean;
    fully_shard(model, mesh, {.mp_policy = kHalved});
    plain->to(at::kBFloat16);
    for (int step = 0; step < 2; ++step) {
      model(input_of(rank));
      plain(input_of(rank).to(at::kBFloat16));
    }
    EXPECT_EQ(mean.scalar_type(), at::kBFloat16) << "a handle from before";
    EXPECT_TRUE(model->norm->running_mean.is_same(mean));
    EXPECT_TRUE(model->named_buffers()["norm.running_mean"].is_same(mean));
    EXPECT_TRUE(mean.equal(plain->norm->running_mean));
    EXPECT_TRUE(model->norm->running_var.equal(plain->norm->running_var));
    EXPECT_EQ(model->norm->num_batches_tracked.scalar_type(), at::kLong);
    EXPECT_EQ(model->norm->num_batches_tracked.item<int64_t>(), 2);
  });
}

TEST_P(BufferDtype, WithoutOneRunningStatisticsAreUpdatedInTheirOwnDtype) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    Normed model, plain;
    const auto mean = model->norm->running_mean;
    fully_shard(model, mesh, {.mp_policy = {.param_dtype = at::kBFloat16}});
    plain->to(at::kBFloat16);
    for (int step = 0; step < 2; ++step) {
      model(input_of(rank));
      plain(input_of(rank).to(at::kBFloat16));
    }
    EXPECT_EQ(mean.scalar_type(), at::kFloat);
    EXPECT_TRUE(model->norm->running_mean.is_same(mean));
    EXPECT_TRUE(mean.equal(plain->norm->running_mean.to(at::kFloat)));
    EXPECT_TRUE(model->norm->running_var.equal(plain->norm->running_var.to(at::kFloat)));
    const auto exact = torch::tensor({0.1F, 1.0F / 3, 2.0F / 3, 0.7F, 0.9F, 1.1F});
    mean.copy_(exact);
    model->eval();
    model(input_of(rank));
    EXPECT_TRUE(mean.equal(exact)) << "an evaluation only reads them, and rounds nothing";
  });
}

TEST_P(BufferDtype, FullPrecisionGivesBuffersTheirOwnBack) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    Normed model;
    const auto mean = model->norm->running_mean;
    auto unit = fully_shard(model, mesh, {.mp_policy = kHalved});
    model(input_of(rank));
    const auto rounded = mean.to(at::kFloat);
    unit.set_full_precision(true);
    EXPECT_EQ(mean.scalar_type(), at::kFloat);
    EXPECT_TRUE(mean.equal(rounded));
    model->eval();
    EXPECT_EQ(model(input_of(rank)).scalar_type(), at::kFloat);
    unit.set_full_precision(false);
    EXPECT_EQ(mean.scalar_type(), at::kBFloat16);
    EXPECT_TRUE(model->norm->running_mean.is_same(mean));
  });
}

TEST_P(BufferDtype, StaysWhileFullParametersAreShown) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    Normed model;
    fully_shard(model, mesh,
                {.mp_policy = {.param_dtype = at::kBFloat16, .buffer_dtype = at::kHalf}});
    const SummonFullParams full(model);
    EXPECT_EQ(model->parameters()[0].scalar_type(), at::kFloat);
    EXPECT_EQ(model->norm->running_mean.scalar_type(), at::kHalf);
    EXPECT_EQ(model->named_buffers()["norm.running_var"].scalar_type(), at::kHalf);
  });
}

TEST_P(BufferDtype, IsThatOfTheNearestUnit) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    Normed model;
    model->register_buffer("own", torch::ones({2}));
    fully_shard(model->norm, mesh);
    fully_shard(model, mesh, {.mp_policy = kHalved});
    EXPECT_EQ(model->norm->running_mean.scalar_type(), at::kFloat);
    EXPECT_EQ(model->named_buffers()["own"].scalar_type(), at::kBFloat16);
  });
}

TEST_P(BufferDtype, OfASharedBufferIsThatOfTheFirstUnit) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    Normed first, second;
    const auto shared = torch::full({2}, 1.0 / 3);
    first->register_buffer("shared", shared);
    second->register_buffer("shared", shared);
    auto unit = fully_shard(first, mesh, {.mp_policy = kHalved});
    auto other = fully_shard(second, mesh, {.mp_policy = {.buffer_dtype = at::kHalf}});
    EXPECT_EQ(shared.scalar_type(), at::kBFloat16);
    EXPECT_EQ(second->norm->running_mean.scalar_type(), at::kHalf);
    other.set_full_precision(true);
    EXPECT_EQ(shared.scalar_type(), at::kBFloat16);
    unit.set_full_precision(true);
    EXPECT_EQ(shared.scalar_type(), at::kFloat);
  });
}

// Module::to is the last word: what it gives a buffer is the buffer's own.
TEST_P(BufferDtype, GoesWithAnotherOneOfTheModulesOwn) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    Normed model;
    auto unit = fully_shard(model, mesh, {.mp_policy = {.buffer_dtype = at::kHalf}});
    model->to(at::kDouble);
    unit.set_full_precision(true);
    EXPECT_EQ(model->norm->running_mean.scalar_type(), at::kDouble);
    unit.set_full_precision(false);
    EXPECT_EQ(model->norm->running_mean.scalar_type(), at::kHalf);
  });
}

TEST_P(BufferDtype, WaitsForValuesWhereInitialisationIsDeferred) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto model = deferred_init([] { return Normed(); });
    fully_shard(model, mesh, {.mp_policy = kHalved});
    EXPECT_TRUE(model->norm->running_var.is_meta());
    materialize(*model);
    EXPECT_EQ(model->norm->running_var.scalar_type(), at::kBFloat16);
    EXPECT_TRUE(model->norm->running_var.equal(torch::ones({6}, at::kBFloat16)));
    get_fsdp_module(*model).set_full_precision(true);
    EXPECT_EQ(model->norm->running_var.scalar_type(), at::kFloat);
  });
}

INSTANTIATE_WORLDS(BufferDtype, 1, 2, 3);

}  // namespace
}  // namespace fsdp::testing
