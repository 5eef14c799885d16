// What may be done while full parameters are shown, and initialisers over a sharded
// model.
#include "tests/fully_shard/support/decoder.h"
#include "tests/fully_shard/support/traffic.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/resident_bytes.h"
#include "tests/support/start_values.h"
#include "tests/support/worlds.h"

#include <ATen/CPUGeneratorImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>
#include <stdexcept>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class SummonScope : public Worlds {};

TEST_P(SummonScope, AForwardInsideHasTheRightNumbersOfEditsToo) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    const auto plain = build_seeded([] { return decoder_model(5, 2); });
    auto sharded = build_seeded([] { return decoder_model(5, 2); });
    shard_decoder(*sharded.module, mesh);
    torch::NoGradGuard no_grad;
    SummonFullParams full(sharded.module);
    EXPECT_TRUE(torch::equal(sharded.loss(make_data(1)), plain.loss(make_data(1))));
    for (const auto& module : {plain.module, sharded.module}) {
      for (auto& parameter : module->parameters()) parameter.mul_(0.5);
    }
    EXPECT_TRUE(torch::equal(sharded.loss(make_data(2)), plain.loss(make_data(2))));
  });
}

TEST_P(SummonScope, ABackwardInsideIsAnErrorAndTheNextStepIsRight) {
  on_ranks([this](int64_t rank, const DeviceMesh& mesh) {
    auto plain = build_seeded([] { return decoder_model(5, 1); });
    auto sharded = build_seeded([] { return decoder_model(5, 1); });
    shard_decoder(*sharded.module, mesh);
    const auto mine = make_data(407 + static_cast<uint64_t>(rank));
    {
      SummonFullParams full(sharded.module);
      EXPECT_THAT(message_of([&] { sharded.loss(mine).backward(); }),
                  AllOf(HasSubstr("SummonFullParams"), HasSubstr("close it first")));
    }
    const auto expected = expected_gradients(plain, world(), 4);
    sharded.loss(mine).backward();
    expect_gradients(*sharded.module, expected, world(), "after the scope");
  });
}

TEST_P(SummonScope, LeftByAnExceptionIsClosedAndKeepsWhatWasWritten) {
  on_ranks([this](int64_t, const DeviceMesh& mesh) {
    auto layer = make_linear(3, 5);
    fully_shard(layer, mesh);
    const auto leave = [&] {
      const SummonFullParams full(layer);
      torch::NoGradGuard no_grad;
      for (auto& parameter : layer->parameters()) parameter.fill_(2);
      throw std::runtime_error("in the scope");
    };
    EXPECT_THAT(message_of(leave), HasSubstr("in the scope"));
    EXPECT_EQ(resident_bytes(counters(mesh)), 0);
    for (const auto& parameter : layer->parameters()) {
      ASSERT_TRUE(is_dtensor(parameter));
      EXPECT_TRUE(torch::equal(full_value(parameter), torch::full(parameter.sizes(), 2.0F)));
    }
    const auto sent = traffic_of(mesh, [&] { layer(torch::ones({1, 3})).sum().backward(); });
    EXPECT_EQ(sent.reduce_scatters, world() == 1 ? 0 : 1);
    EXPECT_TRUE(torch::equal(full_gradient(layer->parameters()[0]), torch::ones({5, 3})));
    EXPECT_NO_THROW(SummonFullParams again(layer));
  });
}

TEST_P(SummonScope, OfAPlainModuleShowsAllItsUnitsAndTheOptionsAreForAll) {
  on_ranks([this](int64_t, const DeviceMesh& mesh) {
    torch::nn::Sequential model(make_linear(4, 4), make_linear(4, 4), make_linear(4, 4));
    const auto start = make_linear(4, 4);
    for (const auto& layer : model->children()) fully_shard(*layer, mesh);
    const auto fill_all = [&](SummonOptions options) {
      const SummonFullParams full(model, options);
      torch::NoGradGuard no_grad;
      for (auto& parameter : model->parameters()) {
        EXPECT_FALSE(is_dtensor(parameter));
        parameter.fill_(7);
      }
    };
    const auto sent = traffic_of(mesh, [&] { fill_all({.writeback = false}); });
    EXPECT_EQ(sent.all_gathers, world() == 1 ? 0 : 3) << "one per unit";
    EXPECT_EQ(resident_bytes(counters(mesh)), 0);
    const auto parameters = model->parameters();
    for (size_t i = 0; i < parameters.size(); ++i)
      EXPECT_TRUE(torch::equal(full_value(parameters[i]), start->parameters()[i % 2])) << i;
    fill_all({});
    for (const auto& parameter : parameters)
      EXPECT_TRUE(torch::equal(full_value(parameter), torch::full(parameter.sizes(), 7.0F)));
    EXPECT_FALSE(is_fsdp_module(*model));
  });
}

// Half a forward, a look at all parameters, and the other half.
torch::Tensor loss_with_scope_inside(DecoderImpl& model, const Data& data, SummonOptions options) {
  auto x = model.blocks[0](model.embedding(data.index));
  {
    const SummonFullParams full(model, options);
    for (const auto& parameter : model.parameters()) EXPECT_FALSE(is_dtensor(parameter));
  }
  return model.head(model.norm(model.blocks[1](x))).pow(2).mean();
}

TEST_P(SummonScope, InTheMiddleOfAForwardIsForLookingUnlessItWritesBack) {
  on_ranks([this](int64_t rank, const DeviceMesh& mesh) {
    const auto build = [] { return decoder_model(5, 2); };
    auto sharded = build_seeded(build);
    shard_decoder(*sharded.module, mesh);
    auto& model = dynamic_cast<DecoderImpl&>(*sharded.module);
    const auto expected = expected_gradients(build_seeded(build), world(), 4);
    const auto mine = make_data(data_seed(4, rank));

    loss_with_scope_inside(model, mine, {.writeback = false}).backward();
    expect_gradients(model, expected, world(), "after a look");
    model.zero_grad();
    if (world() > 1) {  // a world of one has one copy, to which nothing is written back
      const auto loss = loss_with_scope_inside(model, mine, {});
      EXPECT_THAT(message_of([&] { loss.backward(); }),
                  AllOf(HasSubstr("'block0'"), HasSubstr("written after the forward")));
      EXPECT_EQ(resident_bytes(counters(mesh)), 0);
    }
    model.zero_grad();
    sharded.loss(mine).backward();
    expect_gradients(model, expected, world(), "the next step");
  });
}

// Nothing is decided by what runs first: the child is no root, before and after.
TEST_P(SummonScope, AnInitialiserOfAChildMayRunBeforeItsParentsFirstForward) {
  on_ranks([this](int64_t, const DeviceMesh& mesh) {
    const auto build = [] { return decoder_model(MeasuredDecoder::kWidth, kBlocks); };
    const auto plain = build_seeded(build);
    const auto fill = [](torch::nn::Module& module) {
      torch::NoGradGuard no_grad;
      for (auto& parameter : module.parameters(/*recurse=*/false)) parameter.fill_(0.25);
    };
    dynamic_cast<DecoderImpl&>(*plain.module).blocks[1]->apply(fill);
    MeasuredDecoder decoder(mesh);
    const auto applied =
        traffic_of(mesh, [&] { apply_unsharded(*decoder.model->blocks[1], fill); });
    EXPECT_EQ(applied.all_gathers - applied.prefetched, world() == 1 ? 0 : 1)
        << "the child's unit alone, and a guess of what is next";
    EXPECT_EQ(resident_bytes(counters(mesh)), 0);
    EXPECT_FALSE(decoder.block(1).is_root());
    EXPECT_TRUE(decoder.root().is_root());
    decoder.forward();
    EXPECT_EQ(decoder.backward().reduce_scatters, world() == 1 ? 0 : kUnits);
    torch::NoGradGuard no_grad;
    EXPECT_TRUE(torch::equal(loss_of(decoder.model, make_data(6)), plain.loss(make_data(6))));
  });
}

TEST_P(SummonScope, ASeededInitialiserGivesTheWeightsOfTheUnshardedModel) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    const auto plain = build_seeded([] { return decoder_model(5, 3); });
    auto sharded = build_seeded([] { return decoder_model(5, 3); });
    shard_decoder(*sharded.module, mesh);
    // Each rank has a generator of its own: the default one is shared by threads.
    const auto initialiser = [](std::vector<std::string>& order) {
      return [&order, generator = at::make_generator<at::CPUGeneratorImpl>(7)](
                 torch::nn::Module& module) mutable {
        order.push_back(module.name());
        torch::NoGradGuard no_grad;
        for (auto& parameter : module.parameters(/*recurse=*/false))
          parameter.normal_(0, 1, generator);
      };
    };
    std::vector<std::string> expected_order, order;
    plain.module->apply(initialiser(expected_order));
    const auto before = counters(mesh).all_gathers;
    apply_unsharded(*sharded.module, initialiser(order));
    EXPECT_EQ(order, expected_order);
    const auto units = static_cast<int64_t>(fsdp_modules(*sharded.module).size());
    EXPECT_LE(counters(mesh).all_gathers - before, 2 * units)
        << "each unit once, and prefetches that nobody wanted";
    EXPECT_EQ(resident_bytes(counters(mesh)), 0);
    const auto actual = sharded.module->parameters(), expected = plain.module->parameters();
    for (size_t i = 0; i < expected.size(); ++i)
      EXPECT_TRUE(torch::equal(DTensor(actual[i]).full_tensor(), expected[i])) << i;
  });
}

TEST_P(SummonScope, LoadingAFileInsideSaysToCloseTheScopeFirst) {
  on_ranks([](int64_t, const DeviceMesh& mesh) {
    auto linear = make_linear(3, 5), source = make_linear(3, 5);
    {
      torch::NoGradGuard no_grad;  // the same on every rank
      for (auto& parameter : source->parameters())
        parameter.copy_(torch::arange(parameter.numel()).view(parameter.sizes()));
    }
    std::stringstream file;
    torch::save(source, file);
    fully_shard(linear, mesh);
    {
      SummonFullParams full(linear);
      EXPECT_THAT(
          message_of([&] { torch::load(linear, file); }),
          AllOf(HasSubstr("'weight'"), HasSubstr("SummonFullParams"), HasSubstr("close it first")));
    }
    file.seekg(0);
    torch::load(linear, file);
    EXPECT_TRUE(
        torch::equal(DTensor(linear->parameters()[0]).full_tensor(), source->parameters()[0]));
  });
}

INSTANTIATE_WORLDS(SummonScope, 1, 2, 3);

class SummonedBackward : public Worlds {};

TEST_P(SummonedBackward, IsAnErrorWhileTheForwardIsRight) {
  on_ranks([](int64_t rank, const DeviceMesh& mesh) {
    auto plain = build_seeded([] { return decoder_model(8, 2); });
    auto sharded = build_seeded([] { return decoder_model(8, 2); });
    shard_decoder(*sharded.module, mesh);
    const auto data = make_data(407 + static_cast<uint64_t>(rank));
    {
      SummonFullParams full(*sharded.module);
      const auto loss = sharded.loss(data);
      EXPECT_TRUE(torch::equal(loss.detach(), plain.loss(data).detach()));
      EXPECT_THAT(message_of([&] { loss.backward(); }), HasSubstr("SummonFullParams"));
    }
    EXPECT_EQ(resident_bytes(counters(mesh)), 0);
    EXPECT_EQ(counters(mesh).gradient_bytes, 0);
    sharded.module->zero_grad();
    const auto expected = expected_gradients(plain, mesh.size(), 4);
    sharded.loss(data).backward();
    expect_gradients(*sharded.module, expected, mesh.size(), "after the summon");
  });
}

INSTANTIATE_WORLDS(SummonedBackward, 2, 3);

}  // namespace
}  // namespace fsdp::testing
