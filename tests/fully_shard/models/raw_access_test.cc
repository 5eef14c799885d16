// Access that passes no operator is refused with the parameter's name, and leaves the
// parameter as it was; so is what would part a parameter from its shards.
#include "on_demand/on_demand_storage.h"
#include "tests/fully_shard/support/bit_equality.h"
#include "tests/support/errors.h"
#include "tests/support/thread_ranks.h"
#include "tests/support/with_environment.h"
#include "tests/support/write_checks.h"

#include <ATen/CPUFunctions.h>
#include <ATen/NativeFunctions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <sstream>

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;
using torch::Tensor;

const std::vector<std::string> kNamed{"cell0.weight"};

// Multiplies by raw loops.
struct RawProduct : torch::autograd::Function<RawProduct> {
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x, const Tensor& w) {
    auto product = torch::empty_like(x);
    for (int64_t i = 0; i < x.numel(); ++i) {
      product.data_ptr<float>()[i] = x.const_data_ptr<float>()[i] * w.const_data_ptr<float>()[i];
    }
    return product;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    return {gradients[0], gradients[0]};
  }
};

std::vector<Refusal> raw_reads() {
  return {
      {"data_ptr", shapes({{3, 4}}), [](const Tensors& w, Random&) { w[0].data_ptr<float>(); },
       kNamed},
      {"const_data_ptr", shapes({{3, 4}}),
       [](const Tensors& w, Random&) { w[0].const_data_ptr<float>(); }, kNamed},
      {"untyped data_ptr", shapes({{3, 4}}), [](const Tensors& w, Random&) { w[0].data_ptr(); },
       kNamed},
      {"data_ptr of a view", shapes({{3, 4}}),
       [](const Tensors& w, Random&) { w[0].detach()[1].data_ptr(); }, kNamed},
      {"accessor", shapes({{3, 4}}), [](const Tensors& w, Random&) { w[0].accessor<float, 2>(); },
       kNamed},
      {"storage", shapes({{3, 4}}), [](const Tensors& w, Random&) { w[0].storage().data(); },
       kNamed},
      {"mutable storage", shapes({{3, 4}}),
       [](const Tensors& w, Random&) { w[0].storage().mutable_data(); }, kNamed},
      {"from_blob", shapes({{3, 4}}),
       [](const Tensors& w, Random&) {
         torch::from_blob(w[0].data_ptr(), {3, 4});
       },
       kNamed},
      {"raw loops in a function", shapes({{3, 4}}),
       [](const Tensors& w, Random& random) {
         RawProduct::apply(random({3, 4}), w[0]);
       },
       kNamed},
      {"a kernel called directly", shapes({{4, 4}}),
       [](const Tensors& w, Random&) { at::cpu::mm(w[0], w[0]); }, kNamed},
      {"a structured kernel called directly", shapes({{4, 4}}),
       [](const Tensors& w, Random&) { at::cpu::add(w[0], w[0]); }, kNamed},
      {"a native kernel called directly", shapes({{4}}),
       [](const Tensors& w, Random& random) {
         at::native::layer_norm_cpu(random({2, 4}), {4}, w[0], w[0], 1e-5);
       },
       kNamed},
      {"printing doubles",
       [](Random& random) {
         return Tensors{random({3, 4}, torch::kDouble)};
       },
       [](const Tensors& w, Random&) { std::ostringstream() << w[0]; }, kNamed},
      {"saving a member", shapes({{3, 4}}),
       [](const Tensors& w, Random&) {
         std::ostringstream out;
         torch::save(w[0], out);
       },
       kNamed},
      {"pickling a member", shapes({{3, 4}}),
       [](const Tensors& w, Random&) { torch::jit::pickle_save(w[0].detach()); }, kNamed},
      {"a member's storage in another tensor", shapes({{3, 4}}),
       [](const Tensors& w, Random&) {
         torch::NoGradGuard no_grad;
         auto other = torch::empty({0});
         other.set_(w[0].storage());
         other.sum();
       },
       kNamed},
      {"a member inside a sparse coo tensor", shapes({{4}}),
       [](const Tensors& w, Random&) {
         torch::NoGradGuard no_grad;
         const auto indices = torch::tensor({0, 1, 2, 3, 0, 1, 2, 3}).view({2, 4});
         at::mm(at::_sparse_coo_tensor_unsafe(indices, w[0].detach(), {5, 5}), torch::eye(5));
       },
       kNamed},
      {"a member inside a sparse csr tensor", shapes({{3}}),
       [](const Tensors& w, Random&) {
         torch::NoGradGuard no_grad;
         const auto matrix = torch::sparse_csr_tensor(
             torch::tensor({0, 1, 3}), torch::tensor({0, 0, 1}), w[0].detach(),
             std::vector<int64_t>{2, 2}, torch::TensorOptions().layout(torch::kSparseCsr));
         at::mm(matrix, torch::eye(2));
       },
       kNamed},
  };
}

// Refused in a world of one too: it has the same registry.
std::vector<Refusal> storage_changes() {
  return {
      {"set_ from another tensor",
       shapes({{3, 4}}),
       [](const Tensors& w, Random& random) {
         torch::NoGradGuard no_grad;
         w[0].set_(random({3, 4}));
       },
       {"set_", "cell0.weight", "copy_()"}},
      {"set_ from a member",
       shapes({{3, 4}}),
       [](const Tensors& w, Random&) {
         torch::NoGradGuard no_grad;
         torch::empty({0}).set_(w[0].detach());
       },
       {"set_", "cell0.weight"}},
      {"set_data",
       shapes({{3, 4}}),
       [](const Tensors& w, Random& random) {
         w[0].set_data(random({3, 4}));
       },
       {"set_data", "cell0.weight", "copy_()"}},
      {"vector_to_parameters of members",
       shapes({{3, 4}}),
       [](const Tensors& w, Random& random) {
         torch::nn::utils::vector_to_parameters(random({12}), w);
       },
       {"set_data", "cell0.weight"}},
      {"resize_",
       shapes({{3, 4}}),
       [](const Tensors& w, Random&) {
         w[0].detach().resize_({5, 5});
       },
       {"resize_", "cell0.weight"}},
      {"a larger result by out",
       shapes({{4, 4}}),
       [](const Tensors& w, Random& random) {
         torch::NoGradGuard no_grad;
         auto out = w[0];
         at::add_out(out, random({8, 8}), random({8, 8}));
       },
       {"cell0.weight", "[8, 8]"}},
      {"a copy-on-write clone",
       shapes({{3, 4}}),
       [](const Tensors& w, Random&) { at::_lazy_clone(w[0].detach()); },
       {"_lazy_clone", "cell0.weight", "clone()"}},
      {"transpose_",
       shapes({{4, 3}}),
       [](const Tensors& w, Random&) {
         torch::NoGradGuard no_grad;
         w[0].transpose_(0, 1);
       },
       {"cell0.weight", "[3, 4]"}},
  };
}

const auto name_of_refusal = [](const ::testing::TestParamInfo<Refusal>& info) {
  return test_name(info.param.name);
};

class InterceptionRawAccess : public ::testing::TestWithParam<Refusal> {};
TEST_P(InterceptionRawAccess, IsRefusedByName) {
  for (const int64_t world : {2, 3}) expect_refused(GetParam(), world);
}
INSTANTIATE_TEST_SUITE_P(Reads, InterceptionRawAccess, ::testing::ValuesIn(raw_reads()),
                         name_of_refusal);

class InterceptionStorageChange : public ::testing::TestWithParam<Refusal> {};
TEST_P(InterceptionStorageChange, IsRefusedByName) {
  for (const int64_t world : {1, 2, 3}) expect_refused(GetParam(), world);
}
INSTANTIATE_TEST_SUITE_P(Changes, InterceptionStorageChange, ::testing::ValuesIn(storage_changes()),
                         name_of_refusal);

// Ranks with two units; runs with groups unsharded as a program would find them.
void on_two_ranks(const std::function<void(Cells&, FSDPModule)>& body) {
  run_ranks(2, [&](int64_t) {
    Random random;
    auto cells = std::make_shared<Cells>(Tensors{random({4, 4}), random({4, 4})});
    cells->shard(init_device_mesh(torch::kCPU, {2}));
    body(*cells, get_fsdp_module(*cells->cells[0]));
  });
}

TEST(InterceptionRawAccess, AnEmptyMemberKeepsItsSizeInBytes) {
  on_two_ranks(
      [](Cells& cells, FSDPModule) { EXPECT_GE(cells.members()[0].storage().nbytes(), 64); });
}

// In place there is nothing to poison: that mode makes copies.
TEST(InterceptionRawAccess, APointerKeptAcrossAnEvictionReadsGarbageInPoisonMode) {
  const WithEnvironment copies("FSDP_PEER_MEMORY", "copy");
  on_two_ranks([](Cells& cells, FSDPModule unit) {
    torch::NoGradGuard no_grad;
    unit.unshard();
    const auto* pointer = cells.members()[0].const_data_ptr<float>();
    EXPECT_FALSE(std::isnan(pointer[0]));
    internal::OnDemandStorage::of(cells.members()[0].unsafeGetTensorImpl())
        ->group()
        .evict_and_poison();
    for (int i = 0; i < 16; ++i) EXPECT_TRUE(std::isnan(pointer[i])) << i;
  });
}

TEST(InterceptionRawAccess, ARawWriteIsReportedWhenItIsLost) {
  const WriteChecks checks;
  on_two_ranks([](Cells& cells, FSDPModule unit) {
    torch::NoGradGuard no_grad;
    const auto before = cells.members()[0].clone();
    const auto write = [&] {
      unit.unshard();
      std::fill_n(cells.members()[0].data_ptr<float>(), 16, 42.F);
    };
    const auto expected = ::testing::AllOf(HasSubstr("cell0.weight"), HasSubstr("raw pointer"),
                                           HasSubstr("fsdp::mark_shard_written(parameter)"));
    write();
    EXPECT_THAT(message_of([&] { unit.reshard(); }), expected);
    write();
    cells.members()[0].sum();  // its turn, which ends when the next unit's operator empties it
    EXPECT_THAT(message_of([&] { cells.members()[1].sum(); }), expected);
    EXPECT_TRUE(same_bits(cells.members()[0].clone(), before))
        << "reported once, and the shards are as they were";
    EXPECT_EQ(cells.members()[1].sum().dim(), 0);
  });
}

TEST(InterceptionRawAccess, ARawWriteDuringATrainingStepIsReportedByBackward) {
  const WriteChecks checks;
  on_two_ranks([](Cells& cells, FSDPModule) {
    const auto loss = cells.members()[0].pow(2).sum();
    std::fill_n(cells.members()[0].data_ptr<float>(), 16, 42.F);
    EXPECT_THAT(message_of([&] { loss.backward(); }), HasSubstr("cell0.weight"));
    for (auto& entry : cells.entries()) entry.mutable_grad().reset();
    cells.members()[0].pow(2).sum().backward();  // the next step is clean
    EXPECT_TRUE(cells.entries()[0].grad().defined());
  });
}

TEST(InterceptionRawAccess, OperatorsThatWriteAreNoRawWrites) {
  const WriteChecks checks;
  on_two_ranks([](Cells& cells, FSDPModule unit) {
    torch::NoGradGuard no_grad;
    cells.members()[0].fill_(3);
    unit.reshard();
    cells.members()[0].sum();
    cells.entries()[0].fill_(4);  // the unsharded copy is stale now, and differs
    unit.reshard();
    EXPECT_EQ(cells.members()[0].sum().item<float>(), 64);
  });
}

// As unsharded, the values that fit were written by then.
TEST(InterceptionShape, AnOutParameterKeepsItsShapeWhenTheResultIsSmaller) {
  on_two_ranks([](Cells& cells, FSDPModule) {
    torch::NoGradGuard no_grad;
    auto out = cells.members()[0];
    EXPECT_THAT(
        message_of([&] { at::add_out(out, torch::ones({2}), torch::ones({2})); }),
        ::testing::AllOf(HasSubstr("aten::add"), HasSubstr("cell0.weight"), HasSubstr("[2]")));
    EXPECT_EQ(out.sizes(), at::IntArrayRef({4, 4}));
    EXPECT_EQ(out[0][1].item<float>(), 2);
    EXPECT_EQ(DTensor(cells.entries()[0]).full_tensor()[0][1].item<float>(), 2);
  });
}

// What an operator writes without declaring it would be lost, so buffers stay ordinary
// tensors.
TEST(InterceptionRawAccess, BuffersAreNeverOnDemand) {
  EvictAfterEveryOperator evict;
  run_ranks(2, [](int64_t) {
    const torch::nn::BatchNorm1d sharded(4), plain(4);
    fully_shard(sharded, init_device_mesh(torch::kCPU, {2}));
    for (const auto& buffer : sharded->named_buffers()) {
      EXPECT_EQ(internal::OnDemandStorage::of(buffer.value().unsafeGetTensorImpl()), nullptr)
          << buffer.key();
      EXPECT_FALSE(is_dtensor(buffer.value())) << buffer.key();
    }
    Random random;
    const auto x = random({6, 4});
    for (const auto& module : {sharded, plain}) {
      torch::NoGradGuard no_grad;
      at::native_batch_norm(x, module->weight, module->bias, module->running_mean,
                            module->running_var, true, 0.5, 1e-5);
    }
    EXPECT_TRUE(same_bits(sharded->running_mean, plain->running_mean));
    EXPECT_TRUE(same_bits(sharded->running_var, plain->running_var));
    EXPECT_FALSE(torch::equal(plain->running_mean, torch::zeros({4})));
  });
}

// As in FSDP2, whose packing has no kernel for them.
TEST(InterceptionRawAccess, SparseGradientsAreRefusedByNameAndTheNextStepIsClean) {
  for (const int64_t world : {1, 2, 3}) {
    run_ranks(world, [&](int64_t) {
      torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(10, 4).sparse(true));
      torch::nn::init::constant_(embedding->weight, 0.5);  // the same on every rank
      fully_shard(embedding, init_device_mesh(torch::kCPU, {world}));
      const auto step = [&] { embedding->forward(torch::tensor({1, 2})).sum().backward(); };
      for (int i = 0; i < 2; ++i) {
        EXPECT_THAT(message_of(step),
                    ::testing::AllOf(HasSubstr("'weight'"), HasSubstr("sparse=false")));
        EXPECT_FALSE(embedding->parameters()[0].grad().defined());
      }
      embedding->options.sparse(false);
      step();
      const auto gradient = DTensor(embedding->parameters()[0].grad()).full_tensor();
      EXPECT_TRUE(torch::equal(gradient.sum(1),
                               torch::tensor({0, 4, 4, 0, 0, 0, 0, 0, 0, 0}, torch::kFloat)));
    });
  }
}

TEST(InterceptionRawAccess, ChannelsLastParametersAreRefusedByName) {
  run_ranks(1, [](int64_t) {
    const torch::nn::Conv2d convolution(3, 4, 3);
    {
      torch::NoGradGuard no_grad;
      convolution->weight.set_data(
          convolution->weight.contiguous(torch::MemoryFormat::ChannelsLast));
    }
    const auto message =
        message_of([&] { fully_shard(convolution, init_device_mesh(torch::kCPU, {1})); });
    EXPECT_THAT(message, ::testing::AllOf(HasSubstr("'weight'"), HasSubstr("not contiguous")));
    EXPECT_FALSE(is_fsdp_module(*convolution));
  });
}

}  // namespace
}  // namespace fsdp::testing
