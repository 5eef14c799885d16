// Full parameters on request: SummonFullParams, Unsharded, for_each_full_param,
// apply_unsharded.
#include "tests/fully_shard/support/decoder.h"
#include "tests/support/errors.h"
#include "tests/support/resident_bytes.h"
#include "tests/support/start_values.h"
#include "tests/support/worlds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;

class FullParams : public Worlds {};

void expect_full_values(const torch::nn::Module& sharded, const torch::nn::Module& plain) {
  const auto actual = sharded.named_parameters(), expected = plain.named_parameters();
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    EXPECT_EQ(actual[i].key(), expected[i].key());
    EXPECT_TRUE(torch::equal(DTensor(actual[i].value()).full_tensor(), expected[i].value()))
        << actual[i].key();
  }
}

TEST_P(FullParams, AreInTheRegistryForTheScopeAndReadableByPointer) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    const auto plain = build_seeded([] { return decoder_model(5, 2); });
    auto sharded = build_seeded([] { return decoder_model(5, 2); });
    shard_decoder(*sharded.module, mesh);
    {
      SummonFullParams full(sharded.module);
      const auto actual = sharded.module->named_parameters(),
                 expected = plain.module->named_parameters();
      ASSERT_EQ(actual.size(), expected.size());
      for (size_t i = 0; i < actual.size(); ++i) {
        EXPECT_EQ(actual[i].key(), expected[i].key());
        EXPECT_FALSE(is_dtensor(actual[i].value()));
        const auto read = torch::from_blob(actual[i].value().data_ptr(), actual[i].value().sizes());
        EXPECT_TRUE(torch::equal(read, expected[i].value())) << actual[i].key();
      }
    }
    EXPECT_EQ(resident_bytes(counters(mesh)), 0);
    for (const auto& parameter : sharded.module->parameters()) EXPECT_TRUE(is_dtensor(parameter));
    expect_full_values(*sharded.module, *plain.module);
  });
}

TEST_P(FullParams, EachRanksPartOfAChangePersistsWithWriteback) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    auto linear = make_linear(3, 5);
    fully_shard(linear, mesh);
    {
      SummonFullParams full(linear);
      torch::NoGradGuard no_grad;
      linear->parameters()[0].fill_(static_cast<double>(rank));  // through an operator
      std::fill_n(linear->bias.data_ptr<float>(), 5,
                  static_cast<float>(rank));  // and behind its back
    }
    const auto expected = distribute_tensor(torch::zeros({5}), mesh, {Shard{0}}).to_local() + rank;
    EXPECT_TRUE(torch::equal(DTensor(linear->parameters()[1]).to_local(), expected));
    EXPECT_TRUE(torch::equal(DTensor(linear->parameters()[0]).to_local(),
                             expected.unsqueeze(1).expand({-1, 3})));
    const auto x = torch::ones({1, 3});
    EXPECT_TRUE(
        torch::equal(linear(x).detach(),
                     torch::linear(x, DTensor(linear->parameters()[0]).full_tensor().detach(),
                                   DTensor(linear->parameters()[1]).full_tensor().detach())));
  });
}

TEST_P(FullParams, ChangesAreDroppedWithoutWriteback) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    const auto plain = build_seeded([] { return decoder_model(5, 1); });
    auto sharded = build_seeded([] { return decoder_model(5, 1); });
    shard_decoder(*sharded.module, mesh);
    {
      SummonFullParams full(sharded.module, {.writeback = false});
      torch::NoGradGuard no_grad;
      for (auto& parameter : sharded.module->parameters()) parameter.fill_(7);
    }
    expect_full_values(*sharded.module, *plain.module);
    EXPECT_TRUE(torch::equal(sharded.loss(make_data(1)), plain.loss(make_data(1))));
  });
}

TEST_P(FullParams, WithoutRecurseOnlyTheUnitsOwnAreFull) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    auto sharded = build_seeded([] { return decoder_model(5, 1); });
    shard_decoder(*sharded.module, mesh);
    {
      SummonFullParams full(sharded.module, {.recurse = false});
      for (const auto& item : sharded.module->named_parameters()) {
        EXPECT_EQ(is_dtensor(item.value()), item.key().rfind("norm.", 0) != 0) << item.key();
      }
    }
    torch::nn::Sequential outside(dynamic_cast<DecoderImpl&>(*sharded.module).head);
    SummonFullParams nothing(outside, {.recurse = false});
    for (const auto& parameter : outside->parameters()) EXPECT_TRUE(is_dtensor(parameter));
  });
}

TEST_P(FullParams, OnRankZeroOnly) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    const auto plain = build_seeded([] { return decoder_model(5, 1); });
    auto sharded = build_seeded([] { return decoder_model(5, 1); });
    shard_decoder(*sharded.module, mesh);
    SummonFullParams full(sharded.module, {.writeback = false, .rank0_only = true});
    const auto actual = sharded.module->parameters(), expected = plain.module->parameters();
    for (size_t i = 0; i < expected.size(); ++i) {
      ASSERT_EQ(is_dtensor(actual[i]), rank != 0);
      if (rank != 0) continue;
      EXPECT_TRUE(torch::equal(actual[i], expected[i])) << i;
    }
    EXPECT_EQ(resident_bytes(counters(mesh)) > 0, rank == 0 && world() > 1);
  });
}

TEST_P(FullParams, OffloadedAreCopiesWhoseChangesPersistToo) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    auto linear = make_linear(3, 5);
    fully_shard(linear, mesh);
    {
      SummonFullParams full(linear, {.offload_to_cpu = true});
      EXPECT_EQ(resident_bytes(counters(mesh)), 0);
      EXPECT_EQ(linear->parameters()[0].sizes(), at::IntArrayRef({5, 3}));
      EXPECT_TRUE(linear->parameters()[0].requires_grad());
      torch::NoGradGuard no_grad;
      linear->parameters()[0].fill_(3);
    }
    EXPECT_TRUE(
        torch::equal(DTensor(linear->parameters()[0]).full_tensor(), torch::full({5, 3}, 3.0f)));
  });
}

TEST_P(FullParams, BringTheirGradientsWhenAsked) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    auto plain = build_seeded([] { return decoder_model(5, 1); });
    auto sharded = build_seeded([] { return decoder_model(5, 1); });
    shard_decoder(*sharded.module, mesh);
    const auto expected = gradients_of(plain, make_data(2));
    sharded.loss(make_data(2)).backward();
    {
      SummonFullParams full(sharded.module, {.with_grads = true});
      for (size_t i = 0; i < expected.size(); ++i) {
        auto gradient = sharded.module->parameters()[i].grad();
        ASSERT_FALSE(is_dtensor(gradient));
        EXPECT_TRUE(torch::allclose(gradient, expected[i], 1e-6, 1e-9));
        gradient.mul_(2);
      }
    }
    for (size_t i = 0; i < expected.size(); ++i) {
      const auto& gradient = sharded.module->parameters()[i].grad();
      EXPECT_TRUE(torch::allclose(DTensor(gradient).full_tensor(), 2 * expected[i], 1e-6, 1e-9));
    }
  });
}

TEST_P(FullParams, RefusalsLeaveEverythingSharded) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    auto sharded = build_seeded([] { return decoder_model(5, 1); });
    shard_decoder(*sharded.module, mesh);
    const auto summon = [&](SummonOptions options) {
      return [&, options] { SummonFullParams full(sharded.module, options); };
    };
    expect_error<c10::NotImplementedError>(summon({.rank0_only = true}),
                                           HasSubstr("rank0_only with writeback"));
    expect_error<c10::NotImplementedError>(summon({.offload_to_cpu = true, .with_grads = true}),
                                           HasSubstr("offload_to_cpu"));
    {
      SummonFullParams full(sharded.module);
      expect_error<c10::ValueError>(
          [&] { SummonFullParams again(get_fsdp_module(*sharded.module)); },
          HasSubstr("summoned already"));
    }
    const auto x = torch::ones({2}, torch::requires_grad());
    x.register_hook([&](const torch::Tensor&) {
      expect_error<c10::ValueError>(summon({}), HasSubstr("inside a backward"));
    });
    x.sum().backward();
    {
      NoSyncGuard no_sync(get_fsdp_module(*sharded.module));
      sharded.loss(make_data(1)).backward();
    }
    expect_error<c10::ValueError>(summon({.with_grads = true}),
                                  HasSubstr("waits for synchronisation"));
    for (const auto& parameter : sharded.module->parameters()) EXPECT_TRUE(is_dtensor(parameter));
    EXPECT_EQ(resident_bytes(counters(mesh)), 0);
  });
}

TEST_P(FullParams, WritingToARegistryEntryMeanwhileIsAnError) {
  if (world() == 1) return;  // a world of one has one copy only
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    auto linear = make_linear(3, 5);
    fully_shard(linear, mesh);
    const auto entry = linear->parameters()[0];
    const Unsharded unsharded(linear->weight);
    torch::NoGradGuard no_grad;
    expect_error<c10::ValueError>([&] { entry.zero_(); },
                                  HasSubstr("'weight' while its unit is held unsharded"));
  });
}

TEST_P(FullParams, AnUnshardedTensorIsGoodForRawPointers) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    auto linear = make_linear(3, 5), other = make_linear(3, 5);
    fully_shard(linear, mesh);
    fully_shard(other, mesh);
    {
      Unsharded unsharded(linear->parameters()[0]);
      auto* const data = linear->weight.data_ptr<float>();
      torch::NoGradGuard no_grad;
      other(torch::ones({1, 3}));  // would have emptied the first unit
      std::fill_n(data, 15, 2.0f);
      unsharded.mark_written();
    }
    EXPECT_EQ(resident_bytes(counters(mesh)) > 0, world() > 1);  // other
    EXPECT_TRUE(
        torch::equal(DTensor(linear->parameters()[0]).full_tensor(), torch::full({5, 3}, 2.0f)));
    expect_error<c10::ValueError>([] { Unsharded plain(torch::ones({2})); },
                                  HasSubstr("no parameter"));
  });
}

TEST_P(FullParams, AreVisitedByNameTwoUnitsAtATime) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    const auto plain = build_seeded([] { return decoder_model(8, 6); });
    auto sharded = build_seeded([] { return decoder_model(8, 6); });
    shard_decoder(*sharded.module, mesh);
    const int64_t block_bytes = world() * counters(mesh).sharded_bytes / 6;
    reset_peak(mesh);
    const auto expected = plain.module->named_parameters();
    std::vector<std::string> names;
    for_each_full_param(*sharded.module, [&](const std::string& name, const at::Tensor& value) {
      names.push_back(name);
      EXPECT_TRUE(torch::equal(value, expected[name])) << name;
    });
    EXPECT_EQ(names, expected.keys());
    EXPECT_LE(counters(mesh).peak_bytes, 3 * block_bytes);
    EXPECT_EQ(resident_bytes(counters(mesh)), 0);
  });
}

TEST_P(FullParams, ApplyUnshardedInitialisesUnitByUnit) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    auto sharded = build_seeded([] { return decoder_model(8, 6); });
    shard_decoder(*sharded.module, mesh);
    const int64_t block_bytes = world() * counters(mesh).sharded_bytes / 6;
    reset_peak(mesh);
    int64_t modules = 0;
    apply_unsharded(*sharded.module, [&](torch::nn::Module& module) {
      ++modules;
      torch::NoGradGuard no_grad;
      for (auto& parameter : module.parameters(/*recurse=*/false)) {
        EXPECT_FALSE(is_dtensor(parameter));
        parameter.fill_(0.5);
      }
    });
    EXPECT_EQ(modules, static_cast<int64_t>(sharded.module->modules().size()));
    EXPECT_LE(counters(mesh).peak_bytes, 3 * block_bytes);
    for (const auto& parameter : sharded.module->parameters()) {
      EXPECT_TRUE(
          torch::equal(DTensor(parameter).full_tensor(), torch::full(parameter.sizes(), 0.5f)));
    }
  });
}

INSTANTIATE_WORLDS(FullParams, 1, 2, 3);

}  // namespace
}  // namespace fsdp::testing
