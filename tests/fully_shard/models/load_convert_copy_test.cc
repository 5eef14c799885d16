// What users do to a model besides training it: save and load, convert, copy, average.
#include "tests/fully_shard/support/decoder.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/start_values.h"
#include "tests/support/worlds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class UnshardedFiles : public Worlds {};

TEST_P(UnshardedFiles, APlainFileLoadsIntoAShardedModelAndBack) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    Decoder plain(5, 2), sharded(5, 2), again(5, 2);
    {
      torch::NoGradGuard no_grad;
      double value = 0;
      for (auto& parameter : plain->parameters()) parameter.fill_(value += 0.25);
    }
    std::stringstream file, saved;
    torch::save(plain, file);
    shard_decoder(*sharded, mesh);
    torch::load(sharded, file);
    for (size_t i = 0; i < plain->parameters().size(); ++i) {
      ASSERT_TRUE(is_dtensor(sharded->parameters()[i]));
      EXPECT_TRUE(torch::equal(full_value(sharded->parameters()[i]), plain->parameters()[i]));
    }
    const auto data = make_data(1);
    EXPECT_TRUE(torch::equal(loss_of(sharded, data), loss_of(plain, data)));
    {
      SummonFullParams summon(sharded, {.writeback = false});
      torch::save(sharded, saved);
    }
    torch::load(again, saved);
    for (size_t i = 0; i < plain->parameters().size(); ++i) {
      EXPECT_TRUE(torch::equal(again->parameters()[i], plain->parameters()[i]));
    }
  });
}

TEST_P(UnshardedFiles, SavingAShardedModelSaysWhatToDo) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    Decoder model(5, 1);
    shard_decoder(*model, mesh);
    std::stringstream file;
    if (mesh.size() == 1) {  // it has whole values
      EXPECT_NO_THROW(torch::save(model, file));
      return;
    }
    try {
      torch::save(model, file);
      ADD_FAILURE() << "saved";
    } catch (const std::exception& error) {
      EXPECT_THAT(error.what(), HasSubstr("SummonFullParams"));
    }
  });
}

TEST_P(UnshardedFiles, ToAnotherDtypeTrainsOnAsThePlainModel) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    auto plain = build_seeded([] { return decoder_model(5, 2); });
    auto sharded = build_seeded([] { return decoder_model(5, 2); });
    shard_decoder(*sharded.module, mesh);
    sharded.loss(make_data(1)).backward();
    sharded.module->zero_grad();
    const auto before = sharded.module->parameters();
    plain.module->to(torch::kDouble);
    sharded.module->to(torch::kDouble);
    for (size_t i = 0; i < before.size(); ++i) {
      EXPECT_TRUE(before[i].is_same(sharded.module->parameters()[i]));
      EXPECT_EQ(before[i].scalar_type(), torch::kDouble);
      EXPECT_TRUE(torch::equal(full_value(before[i]), plain.module->parameters()[i]));
    }
    EXPECT_EQ(dynamic_cast<DecoderImpl&>(*sharded.module).head->weight.scalar_type(),
              torch::kDouble);
    auto expected = expected_gradients(plain, world(), 4);
    sharded.loss(make_data(407 + static_cast<uint64_t>(rank))).backward();
    expect_gradients(*sharded.module, expected, world(), "double");
  });
}

TEST_P(UnshardedFiles, AConversionThatIsRefusedLeavesEveryParameterAsItWas) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    auto model = build_seeded([] { return decoder_model(5, 1); });
    shard_decoder(*model.module, mesh);
    const auto parameters = model.module->parameters();
    const auto loss = model.loss(make_data(1));
    EXPECT_ANY_THROW(model.module->to(torch::kDouble));
    for (size_t i = 0; i < parameters.size(); ++i) {
      EXPECT_TRUE(parameters[i].is_same(model.module->parameters()[i])) << i;
      EXPECT_EQ(parameters[i].scalar_type(), torch::kFloat) << i;
    }
    EXPECT_NO_THROW(loss.backward());
  });
}

TEST_P(UnshardedFiles, ToTheSameDtypeChangesNothing) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    Decoder model(5, 1);
    shard_decoder(*model, mesh);
    EXPECT_NO_THROW(model->to(torch::kFloat));
    EXPECT_NO_THROW(model->to(torch::kCPU));
  });
}

TEST_P(UnshardedFiles, TheDtypeCanNotChangeUnderALivingGraph) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    auto model = build_seeded([] { return decoder_model(5, 1); });
    shard_decoder(*model.module, mesh);
    const auto loss = model.loss(make_data(1));
    try {
      model.module->to(torch::kDouble);
      ADD_FAILURE() << "converted";
    } catch (const c10::ValueError& error) {
      EXPECT_THAT(error.what_without_backtrace(), HasSubstr("a graph that uses it is alive"));
    }
    EXPECT_NO_THROW(loss.backward());
  });
}

TEST_P(UnshardedFiles, CloningAShardedModuleIsAnErrorThatSaysWhatToDoAndLeavesItAlone) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    auto linear = make_linear(3, 5);
    fully_shard(linear, mesh);
    expect_error<c10::ValueError>([&] { linear->clone(); },
                                  AllOf(HasSubstr("Module::clone of a sharded module"),
                                        HasSubstr("Build a new module, apply fully_shard to it"),
                                        HasSubstr("copy the registry entries")));
    EXPECT_TRUE(is_dtensor(linear->parameters()[0]));
    EXPECT_NO_THROW(linear(torch::ones({1, 3})).sum().backward());
  });
}

TEST_P(UnshardedFiles, AnAverageOfRegistryEntriesEqualsThatOfThePlainModel) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    auto plain = build_seeded([] { return decoder_model(5, 1); });
    auto sharded = build_seeded([] { return decoder_model(5, 1); });
    shard_decoder(*sharded.module, mesh);
    const auto train = [](Model& model) {
      std::vector<torch::Tensor> average;
      for (const auto& parameter : model.module->parameters())
        average.push_back(parameter.detach().clone());
      torch::optim::SGD optimizer(model.module->parameters(), 0.5);
      for (uint64_t step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        model.loss(make_data(step)).backward();
        optimizer.step();
        torch::NoGradGuard no_grad;
        for (size_t i = 0; i < average.size(); ++i)
          average[i].lerp_(model.module->parameters()[i], 0.1);
      }
      return average;
    };
    const auto expected = train(plain), actual = train(sharded);
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(torch::allclose(full_value(actual[i]), expected[i], 1e-5, 1e-7));
    }
  });
}

INSTANTIATE_WORLDS(UnshardedFiles, 1, 2, 3);

}  // namespace
}  // namespace fsdp::testing
