// FullyShardOptions::gather_codec_fn: members are decode(encode(weight)) with the same
// bits in every world and setting, shards keep their precision, fewer bytes travel, and
// what goes wrong is told on every rank.
#include "fully_shard/params/shard_buffer.h"
#include "tests/fully_shard/support/traffic.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/start_values.h"
#include "tests/support/worlds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Codec = std::shared_ptr<const GatherCodec>;
using torch::Tensor;

const std::vector<Codec> kCodecs = {mxfp8(), mxint8(), fp8_rows(), nf4()};

// decode(encode(weight)), cut along dimension 0, in the member's dtype.
Tensor decoded(const GatherCodec& codec, const Tensor& weight, at::ScalarType dtype = at::kFloat) {
  const auto rows = weight.detach().contiguous().view({weight.size(0), -1});
  const auto codes = torch::empty({rows.size(0), codec.row_bytes(rows.size(1))}, at::kByte);
  codec.encode(rows, codes);
  const auto values = torch::empty(rows.sizes(), dtype);
  codec.decode(codes, values);
  return values.view(weight.sizes());
}

FullyShardOptions of_matrices(Codec codec, FullyShardOptions options = {}) {
  options.gather_codec_fn = [codec = std::move(codec)](const std::string&, const Tensor& weight) {
    return weight.dim() == 2 ? codec : nullptr;
  };
  return options;
}

Decoder seeded_decoder(int64_t width) {
  Decoder model{nullptr};
  build_seeded([&] {
    model = Decoder(width, 2);
    return Model{model.ptr(), {}};
  });
  return model;
}

Data batch_of(int64_t rank, uint64_t step) { return make_data(data_seed(step, rank)); }

// The masters of an unsharded model that trains with decoded copies of them.
class DecodedTraining {
 public:
  DecodedTraining(Codec codec, int64_t width, at::ScalarType member_dtype = at::kFloat)
      : codec_(std::move(codec)),
        masters_(seeded_decoder(width)),
        copy_(seeded_decoder(width)),
        optimizer_(masters_->parameters(), 0.1) {
    copy_->to(member_dtype);
  }

  // Gradients are added in the order of the ranks.
  void step(int64_t world, uint64_t step) {
    std::vector<Tensor> sums(masters_->parameters().size());
    for (int64_t rank = 0; rank < world; ++rank) {
      decode();
      copy_->zero_grad();
      loss_of(copy_, batch_of(rank, step)).backward();
      for (size_t i = 0; i < sums.size(); ++i) {
        const auto term = copy_->parameters()[i].grad().to(at::kFloat);
        sums[i] = sums[i].defined() ? sums[i] + term : term.clone();
      }
    }
    for (size_t i = 0; i < sums.size(); ++i)
      masters_->parameters()[i].mutable_grad() = sums[i] / world;
    optimizer_.step();
  }

  std::vector<Tensor> masters() const { return masters_->parameters(); }
  std::vector<Tensor> members() {
    decode();
    return copy_->parameters();
  }

 private:
  void decode() {
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < masters_->parameters().size(); ++i) {
      const auto master = masters_->parameters()[i];
      auto copy = copy_->parameters()[i];
      copy.copy_(master.dim() == 2 ? decoded(*codec_, master, copy.scalar_type()) : master);
    }
  }

  Codec codec_;
  Decoder masters_, copy_;
  torch::optim::SGD optimizer_;
};

void expect_equal(const std::vector<Tensor>& actual, const std::vector<Tensor>& expected,
                  const std::string& where) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i)
    EXPECT_TRUE(full_value(actual[i]).equal(expected[i].detach())) << where << ": parameter " << i;
}

// The handles that model code holds, in the order of parameters().
std::vector<Tensor> members_of(Decoder& model) {
  std::vector<Tensor> members;
  for (const auto& module : model->modules(/*include_self=*/false)) {
    if (auto* linear = module->as<torch::nn::Linear>()) {
      members.push_back(linear->weight);
      members.push_back(linear->bias);
    } else if (auto* norm = module->as<torch::nn::LayerNorm>()) {
      members.push_back(norm->weight);
      members.push_back(norm->bias);
    } else if (auto* embedding = module->as<torch::nn::Embedding>()) {
      members.push_back(embedding->weight);
    }
  }
  return members;
}

void expect_members(Decoder& model, DecodedTraining& reference, const std::string& where) {
  const torch::NoGradGuard no_grad;
  std::vector<Tensor> members;
  for (const auto& member : members_of(model)) members.push_back(member.clone());
  expect_equal(members, reference.members(), where + ", members");
}

class GatherCodecs : public Worlds {};

// A sharded model, and an unsharded one whose members are the decoded codes.
void expect_trains_alike(const Codec& codec, const DeviceMesh& mesh, int64_t rank,
                         std::optional<at::ScalarType> param_dtype = {}) {
  auto model = seeded_decoder(6);
  shard_decoder_with(of_matrices(codec, {.mp_policy = {.param_dtype = param_dtype}}), *model, mesh);
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  DecodedTraining reference(codec, 6, param_dtype.value_or(at::kFloat));
  for (uint64_t step = 0; step < 3; ++step) {
    expect_members(model, reference, codec->name);
    optimizer.zero_grad();
    loss_of(model, batch_of(rank, step)).backward();
    optimizer.step();
    reference.step(mesh.size(), step);
    expect_equal(model->parameters(), reference.masters(), codec->name);
  }
}

TEST_P(GatherCodecs, TrainAsAnUnshardedModelWithDecodedMembers) {
  for (const auto& codec : kCodecs) {
    on_ranks([&](int64_t rank, const DeviceMesh& mesh) { expect_trains_alike(codec, mesh, rank); });
  }
}

TEST_P(GatherCodecs, DecodeIntoTheDtypeOfMixedPrecision) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    expect_trains_alike(mxfp8(), mesh, rank, at::kBFloat16);
  });
}

TEST_P(GatherCodecs, FewerBytesTravel) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    const auto gathered = [&](const FullyShardOptions& options) {
      torch::nn::Linear linear(torch::nn::LinearOptions(1024, 240).bias(false));
      set_start_values(*linear);
      fully_shard(linear, mesh, options);
      return traffic_of(mesh, [&] { linear(torch::ones({1, 1024})).sum().backward(); });
    };
    const auto values = gathered({}), codes = gathered(of_matrices(mxfp8())),
               nibbles = gathered(of_matrices(nf4()));
    const auto others = (world() - 1) * ((240 + world() - 1) / world());  // rows
    EXPECT_EQ(values.all_gather_bytes, others * 1024 * 4);
    const auto aligned = [&](int64_t row) {
      return (world() - 1) * internal::align_up((240 + world() - 1) / world() * row);
    };
    EXPECT_EQ(codes.all_gather_bytes, aligned(1024 + 32));
    EXPECT_EQ(nibbles.all_gather_bytes, aligned(512 + 16 + 8));
    EXPECT_EQ(codes.all_gathers, values.all_gathers + (world() == 1 ? 1 : 0));
    EXPECT_EQ(counters(mesh).staging_bytes, 0);
    EXPECT_EQ(resident_bytes(counters(mesh)), 0);
  });
}

INSTANTIATE_WORLDS(GatherCodecs, 1, 2, 3, 4, 5);

// Of an option that changes where values lie or go, the gradients of a model with codecs
// are those of one without, as long as encoding changes nothing: weights are decoded
// ones.
struct Setting {
  std::string name;
  std::vector<int64_t> mesh;
  FullyShardOptions options = {};
  bool offloads = false;
};

std::ostream& operator<<(std::ostream& out, const Setting& setting) { return out << setting.name; }

std::optional<Placement> uneven_rows(const std::string&, const Tensor& weight) {
  const auto rows = weight.size(0);
  return RaggedShard{.dim = 0, .local_units = {1, 0, rows - 1}};
}

std::optional<Placement> owned(const std::string&, const Tensor&) { return Owned{}; }

std::optional<Placement> along_columns(const std::string&, const Tensor& weight) {
  return weight.dim() == 3 ? std::optional<Placement>(Shard{1}) : std::nullopt;
}

std::optional<Placement> blocks_of_two(const std::string&, const Tensor& weight) {
  if (weight.size(0) % 2 != 0) return std::nullopt;
  return Shard{.dim = 0, .unit = 2};
}

std::vector<Setting> settings() {
  return {
      {"to_world", {4}, {.reshard_after_forward = ReshardAfterForward::to_world(2)}},
      {"stays", {2}, {.reshard_after_forward = false}},
      {"ragged", {3}, {.shard_placement_fn = uneven_rows}},
      {"owners", {3}, {.shard_placement_fn = owned}},
      {"units", {3}, {.shard_placement_fn = blocks_of_two}},
      {"hsdp", {2, 2}},
      {"hsdp_of_one_shard", {2, 1}},
      {"hfsdp", {2, 2}, {.outer = Outer::kShardOptimizer}},
      {"hfsdp_uneven", {2, 3}, {.outer = Outer::kShardOptimizer}},
      {"hfsdp_offloaded", {2, 2}, {.outer = Outer::kShardOptimizer}, true},
      {"offloaded", {2}, {}, true},
      {"offloaded_alone", {1}, {}, true},
  };
}

class CodecsBeside : public ::testing::TestWithParam<Setting> {
 protected:
  CodecsBeside() { internal::set_offloads_from_cpu(GetParam().offloads); }
  ~CodecsBeside() override { internal::set_offloads_from_cpu(false); }

  int64_t world() const {
    int64_t world = 1;
    for (const auto size : GetParam().mesh) world *= size;
    return world;
  }
  FullyShardOptions options() const {
    auto options = GetParam().options;
    options.offload_policy.offload_to_cpu = GetParam().offloads;
    return options;
  }
};

// Whole values, the same on every rank, that encoding leaves as they are.
void write_decoded(const GatherCodec& codec, const std::vector<Tensor>& entries) {
  const torch::NoGradGuard no_grad;
  for (auto entry : entries) {
    const auto value =
        full_value(entry) - (entry.grad().defined() ? full_gradient(entry) : full_value(entry) * 0);
    entry.copy_(entry.dim() == 2 ? decoded(codec, value) : value);
  }
}

TEST_P(CodecsBeside, GiveTheSameGradients) {
  for (const auto& codec : {mxfp8(), mxint8()}) {
    run_ranks(world(), [&](int64_t rank) {
      const auto mesh = init_device_mesh(torch::kCPU, GetParam().mesh);
      auto with = seeded_decoder(6), without = seeded_decoder(6);
      shard_decoder_with(of_matrices(codec, options()), *with, mesh);
      shard_decoder_with(options(), *without, mesh);
      for (uint64_t step = 0; step < 3; ++step) {
        write_decoded(*codec, with->parameters());
        write_decoded(*codec, without->parameters());
        with->zero_grad();
        without->zero_grad();
        const auto loss = loss_of(with, batch_of(rank, step));
        const auto expected = loss_of(without, batch_of(rank, step));
        EXPECT_TRUE(loss.equal(expected)) << loss << " " << expected;
        loss.backward();
        expected.backward();
        for (size_t i = 0; i < with->parameters().size(); ++i)
          EXPECT_TRUE(
              full_gradient(with->parameters()[i]).equal(full_gradient(without->parameters()[i])))
              << codec->name << " " << i;
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Settings, CodecsBeside, ::testing::ValuesIn(settings()),
                         [](const auto& info) { return info.param.name; });

// A weight of [4, 5, 40], cut along dimension 1: several runs for each rank.
TEST(GatherCodecsOfOtherDimensions, EncodeTheRowsOfTheCut) {
  on_ranks_of(3, [](int64_t, const DeviceMesh& mesh) {
    struct Cube : torch::nn::Module {
      Cube() : weight(register_parameter("weight", torch::linspace(-3, 5, 800).view({4, 5, 40}))) {}
      Tensor weight;
    };
    auto cube = std::make_shared<Cube>();
    const auto start = cube->weight.detach().clone();
    fully_shard(cube, mesh,
                {.shard_placement_fn = along_columns,
                 .gather_codec_fn = [](const std::string&, const Tensor&) { return mxfp8(); }});
    const torch::NoGradGuard no_grad;
    const auto expected = decoded(*mxfp8(), start.view({20, 40})).view({4, 5, 40});
    EXPECT_TRUE(cube->weight.clone().equal(expected));
  });
}

TEST(GatherCodecsAndWrites, AMemberThatIsWrittenReachesTheShards) {
  on_ranks_of(2, [](int64_t, const DeviceMesh& mesh) {
    auto linear = make_linear(40, 6);
    auto unit = fully_shard(linear, mesh, of_matrices(mxfp8()));
    const torch::NoGradGuard no_grad;
    const auto value = torch::linspace(-2, 3, 240).view({6, 40});
    linear->weight.copy_(value);
    EXPECT_TRUE(full_value(linear->parameters()[0]).equal(value)) << "in full precision";
    unit.reshard();
    EXPECT_TRUE(linear->weight.clone().equal(decoded(*mxfp8(), value)));
    linear->weight[1].fill_(2);
    auto expected = decoded(*mxfp8(), value);
    expected[1].fill_(2);
    EXPECT_TRUE(full_value(linear->parameters()[0]).equal(expected)) << "of the decoded copy";
  });
}

TEST(GatherCodecsAndWrites, SummonedParametersAreTheShards) {
  on_ranks_of(2, [](int64_t, const DeviceMesh& mesh) {
    auto linear = make_linear(40, 6);
    const auto start = linear->weight.detach().clone();
    fully_shard(linear, mesh, of_matrices(mxfp8()));
    {
      const torch::NoGradGuard no_grad;
      const SummonFullParams summoned(linear);
      EXPECT_TRUE(linear->parameters()[0].equal(start));
      linear->parameters()[0].mul_(2);
    }
    EXPECT_TRUE(full_value(linear->parameters()[0]).equal(start * 2));
  });
}

TEST(GatherCodecsAndWrites, FullPrecisionLeavesThemOut) {
  on_ranks_of(2, [](int64_t, const DeviceMesh& mesh) {
    auto linear = make_linear(40, 6);
    const auto start = linear->weight.detach().clone();
    auto unit = fully_shard(linear, mesh, of_matrices(nf4()));
    const torch::NoGradGuard no_grad;
    EXPECT_TRUE(linear->weight.clone().equal(decoded(*nf4(), start)));
    unit.set_full_precision(true);
    EXPECT_TRUE(linear->weight.clone().equal(start));
    unit.set_full_precision(false);
    EXPECT_TRUE(linear->weight.clone().equal(decoded(*nf4(), start)));
  });
}

class StoredCodes : public Worlds {};

// A frozen matrix in NF4, and a bias that is trained.
TEST_P(StoredCodes, TakeTheirBytesAndComputeAsBefore) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    auto stored = make_linear(128, 21), gathered = make_linear(128, 21);
    const auto start = stored->weight.detach().clone();
    for (auto* layer : {&stored, &gathered}) {
      (*layer)->weight.set_requires_grad(false);
      fully_shard(*layer, mesh, of_matrices(nf4()));
    }
    const auto before = counters(mesh).sharded_bytes;
    EXPECT_EQ(store_codes(stored), 1);
    EXPECT_EQ(store_codes(stored), 0) << "once";
    const auto rows = (21 + world() - 1) / world();
    EXPECT_EQ(before - counters(mesh).sharded_bytes,
              internal::align_up(rows * 128 * 4) - internal::align_up(rows * (64 + 2 + 8)));
    torch::optim::SGD of_stored(stored->parameters(), 0.1),
        of_gathered(gathered->parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      const auto x = torch::linspace(-1, 2, 256).view({2, 128}) * static_cast<double>(rank + step);
      for (auto* optimizer : {&of_stored, &of_gathered}) optimizer->zero_grad();
      const auto y = stored(x), expected = gathered(x);
      EXPECT_TRUE(y.equal(expected));
      y.pow(2).sum().backward();
      expected.pow(2).sum().backward();
      for (auto* optimizer : {&of_stored, &of_gathered}) optimizer->step();
    }
    const torch::NoGradGuard no_grad;
    EXPECT_TRUE(stored->weight.clone().equal(decoded(*nf4(), start)));
    EXPECT_TRUE(full_value(stored->parameters()[1]).equal(full_value(gathered->parameters()[1])));
    const auto codes = full_value(stored->parameters()[0]);
    auto expected = torch::empty({21, 64 + 2 + 8}, at::kByte);
    nf4()->encode(start, expected);
    EXPECT_TRUE(codes.equal(expected)) << "the entry is the codes";
  });
}

INSTANTIATE_WORLDS(StoredCodes, 1, 2, 3, 5);

TEST(StoredCodesOfOtherMeshes, ComputeAsBefore) {
  for (const auto outer : {Outer::kReplicate, Outer::kShardOptimizer}) {
    run_ranks(4, [&](int64_t) {
      const auto mesh = init_device_mesh(torch::kCPU, {2, 2});
      auto linear = make_linear(128, 21);
      const auto start = linear->weight.detach().clone();
      linear->weight.set_requires_grad(false);
      auto unit = fully_shard(linear, mesh, of_matrices(mxfp8(), {.outer = outer}));
      store_codes(linear);
      const torch::NoGradGuard no_grad;
      EXPECT_TRUE(linear->weight.clone().equal(decoded(*mxfp8(), start)));
    });
  }
}

TEST(StoredCodesMistakes, AreRefusedWithNothingChanged) {
  on_ranks_of(2, [](int64_t, const DeviceMesh& mesh) {
    auto linear = make_linear(128, 8);
    auto unit = fully_shard(linear, mesh, of_matrices(nf4()));
    expect_error<c10::ValueError>(
        [&] { store_codes(linear); },
        AllOf(HasSubstr("parameter 'weight' is trained"), HasSubstr("requires_grad_(false)")));
    linear->parameters()[0].set_requires_grad(false);
    {
      const auto y = linear(torch::ones({1, 128}));  // its graph uses the unit
      expect_error<c10::ValueError>([&] { store_codes(linear); }, HasSubstr("graph"));
    }
    EXPECT_EQ(store_codes(linear), 1);
    const torch::NoGradGuard no_grad;
    const auto codes = DTensor(linear->parameters()[0]).to_local().clone();
    expect_error<c10::ValueError>([&] { linear->weight.mul_(2); },
                                  AllOf(HasSubstr("'weight'"), HasSubstr("stored as codes")));
    {
      Unsharded held(linear->weight);
      expect_error<c10::ValueError>([&] { held.mark_written(); }, HasSubstr("stored as codes"));
    }
    EXPECT_TRUE(DTensor(linear->parameters()[0]).to_local().equal(codes));
    linear->weight.set_requires_grad(true);
    expect_error<c10::ValueError>(
        [&] { linear->weight.clone(); },
        AllOf(HasSubstr("'weight' can not be trained"), HasSubstr("stored as codes")));
    linear->weight.set_requires_grad(false);
    expect_error<c10::ValueError>([&] { linear->to(at::kDouble); }, HasSubstr("stored as codes"));
    unit.set_full_precision(true);
    EXPECT_EQ(linear->weight.clone().sizes(), (std::vector<int64_t>{8, 128})) << "still decoded";
  });
}

// All units or none: the second one has a gradient that waits.
TEST(StoredCodesMistakes, OneUnitThatCanNotKeepsAllAsTheyAre) {
  on_ranks_of(2, [](int64_t, const DeviceMesh& mesh) {
    torch::nn::Sequential model(make_linear(128, 8), make_linear(8, 128));
    std::vector<FSDPModule> units;
    for (const auto& child : model->children())
      units.push_back(fully_shard(child, mesh, of_matrices(mxfp8())));
    fully_shard(model, mesh);
    units[1].set_requires_gradient_sync(false);
    model->forward(torch::ones({1, 128})).sum().backward();
    for (auto& parameter : model->parameters()) parameter.set_requires_grad(false);
    model->zero_grad();
    expect_error<c10::ValueError>(
        [&] { store_codes(*model); },
        AllOf(HasSubstr("parameter '1.weight'"), HasSubstr("gradients wait for a reduction")));
    EXPECT_EQ(model->parameters()[0].scalar_type(), at::kFloat);
    units[1].zero_pending_gradients();
    units[0].set_full_precision(true);
    expect_error<c10::ValueError>([&] { store_codes(*model); }, HasSubstr("in full precision"));
    units[0].set_full_precision(false);
    EXPECT_EQ(store_codes(*model), 2);
  });
}

TEST(StoredCodesMistakes, ACodecThatThrowsLeavesTheUnitAsItWas) {
  on_one_rank([](const DeviceMesh& mesh) {
    auto codec = std::make_shared<GatherCodec>(*mxfp8());
    codec->encode = [](const Tensor&, const Tensor&) { TORCH_CHECK(false, "no"); };
    auto linear = make_linear(40, 7);
    linear->weight.set_requires_grad(false);
    const auto start = linear->weight.detach().clone();
    auto unit = fully_shard(linear, mesh, of_matrices(codec));
    EXPECT_THAT(message_of([&] { store_codes(linear); }), HasSubstr("failed to encode: no"));
    EXPECT_TRUE(full_value(linear->parameters()[0]).equal(start));
    unit.set_full_precision(true);
    const torch::NoGradGuard no_grad;
    EXPECT_TRUE(linear->weight.clone().equal(start));
  });
}

// Ranks of other seeds are told, though what they gather are codes.
TEST(StoredCodesMistakes, StartValuesAreStillCompared) {
  run_ranks(2, [](int64_t rank) {
    const auto mesh = init_device_mesh(torch::kCPU, {2});
    auto linear = make_linear(128, 8);
    linear->weight.set_requires_grad(false).mul_(static_cast<double>(rank + 1));
    fully_shard(linear, mesh, of_matrices(nf4()));
    store_codes(linear);
    const torch::NoGradGuard no_grad;
    EXPECT_THAT(message_of([&] { linear->weight.clone(); }),
                AllOf(HasSubstr("'weight'"), HasSubstr("started with other values")));
  });
}

Codec of_bytes(std::function<int64_t(int64_t)> row_bytes) {
  auto codec = std::make_shared<GatherCodec>(*mxfp8());
  codec->name = "mine";
  codec->row_bytes = std::move(row_bytes);
  return codec;
}

TEST(GatherCodecMistakes, AreRefusedWithNothingChanged) {
  on_one_rank([](const DeviceMesh& mesh) {
    auto linear = make_linear(8, 4);
    const auto refused = [&](const Codec& codec, const auto& matcher) {
      expect_error<c10::ValueError>(
          [&] {
            fully_shard(linear, mesh,
                        {.gather_codec_fn = [&](const auto&, const auto&) { return codec; }});
          },
          matcher);
      EXPECT_FALSE(is_fsdp_module(linear));
    };
    refused(of_bytes([](int64_t n) { return 4 * n; }),
            AllOf(HasSubstr("gather_codec_fn gave 'mine' for parameter 'weight'"),
                  HasSubstr("takes 32 bytes; allowed are 1 to 31"), HasSubstr("(rank 0)")));
    refused(of_bytes([](int64_t) { return 0; }), HasSubstr("takes 0 bytes"));
    refused(std::make_shared<GatherCodec>(), HasSubstr("lacks row_bytes, encode or decode"));
    struct Counts : torch::nn::Module {
      Counts() {
        register_parameter("count", torch::ones({4, 40}, at::kLong), /*requires_grad=*/false);
      }
    };
    auto counts = std::make_shared<Counts>();
    expect_error<c10::ValueError>(
        [&] { fully_shard(counts, mesh, of_matrices(mxfp8())); },
        AllOf(HasSubstr("'count'"), HasSubstr("Long"), HasSubstr("allowed are floating ones")));
  });
}

TEST(GatherCodecMistakes, AutoShardRefusesThemBeforeAnyUnit) {
  on_one_rank([](const DeviceMesh& mesh) {
    auto model = seeded_decoder(6);
    const auto codec_fn = [](const std::string& name, const Tensor&) {
      return name == "head.weight" || name == "weight" ? std::make_shared<GatherCodec>() : nullptr;
    };
    expect_error<c10::ValueError>(
        [&] { auto_shard(model, by_type<Block>(), mesh, {.gather_codec_fn = codec_fn}); },
        HasSubstr("lacks row_bytes"));
    EXPECT_TRUE(fsdp_modules(*model).empty());
  });
}

TEST(GatherCodecMistakes, OneThatThrowsOnOneRankIsEveryRanksErrorAndTheNextTouchGathers) {
  for (const auto& shape : {std::vector<int64_t>{3}, {2, 2}}) {
    for (const auto outer : {Outer::kReplicate, Outer::kShardOptimizer}) {
      if (shape.size() == 1 && outer == Outer::kShardOptimizer) continue;
      run_ranks(shape.size() == 1 ? 3 : 4, [&](int64_t rank) {
        const auto mesh = init_device_mesh(torch::kCPU, shape);
        auto codec = std::make_shared<GatherCodec>(*mxfp8());
        auto fails = std::make_shared<bool>(rank == 1);
        codec->encode = [fails](const Tensor& values, const Tensor& codes) {
          TORCH_CHECK(!*fails, "out of dictionary");
          mxfp8()->encode(values, codes);
        };
        auto linear = make_linear(40, 7);
        const auto start = linear->weight.detach().clone();
        fully_shard(linear, mesh, of_matrices(codec, {.outer = outer}));
        const torch::NoGradGuard no_grad;
        // Ranks that gather with rank 1; others have nothing to do with it.
        const bool is_concerned =
            shape.size() == 1 || (outer == Outer::kReplicate ? rank < 2 : rank % 2 == 1);
        // Ranks of HFSDP that are not wait for the others' inner shards.
        if (outer == Outer::kShardOptimizer && !is_concerned) {
          *fails = false;
          EXPECT_TRUE(linear->weight.clone().equal(decoded(*mxfp8(), start)));
          return;
        }
        const auto told = message_of([&] { linear->weight.clone(); });
        if (is_concerned) {
          EXPECT_THAT(told, AllOf(HasSubstr("codec 'MXFP8' of parameter 'weight' failed to encode"),
                                  HasSubstr("out of dictionary"), HasSubstr("on rank 1")));
        }
        *fails = false;
        EXPECT_TRUE(linear->weight.clone().equal(decoded(*mxfp8(), start)));
      });
    }
  }
}

TEST(GatherCodecMistakes, OneThatCanNotDecodeNamesTheParameter) {
  on_one_rank([](const DeviceMesh& mesh) {
    auto codec = std::make_shared<GatherCodec>(*mxfp8());
    codec->decode = [](const Tensor&, const Tensor&) { TORCH_CHECK(false, "no key"); };
    auto linear = make_linear(40, 7);
    fully_shard(linear, mesh, of_matrices(codec));
    EXPECT_THAT(message_of([&] {
                  linear(torch::ones({1, 40}));
                }),
                AllOf(HasSubstr("codec 'MXFP8' of parameter 'weight' failed to decode: no key")));
  });
}

TEST(GatherCodecMistakes, OtherCodecsOnOneRankAreEveryRanksError) {
  // Of one size; of another; and none.
  for (const auto& other : {mxint8(), nf4(), Codec()}) {
    run_ranks(2, [&](int64_t rank) {
      const auto mesh = init_device_mesh(torch::kCPU, {2});
      auto linear = make_linear(64, 8);
      fully_shard(linear, mesh, of_matrices(rank == 0 ? mxfp8() : other));
      const torch::NoGradGuard no_grad;
      EXPECT_THAT(message_of([&] { linear->weight.clone(); }), HasSubstr("'weight'"));
    });
  }
}

// The ranks compare before they decode, which would fail on rank 0.
TEST(GatherCodecMistakes, OtherCodecsAreToldWhereTheirCodesCanNotBeDecoded) {
  run_ranks(2, [](int64_t rank) {
    const auto mesh = init_device_mesh(torch::kCPU, {2});
    auto strict = std::make_shared<GatherCodec>(*mxfp8());
    strict->name = "strict";
    strict->decode = [](const Tensor&, const Tensor&) { TORCH_CHECK(false, "not mine"); };
    auto linear = make_linear(64, 8);
    fully_shard(linear, mesh, of_matrices(rank == 0 ? strict : mxfp8()));
    const torch::NoGradGuard no_grad;
    EXPECT_THAT(
        message_of([&] { linear->weight.clone(); }),
        AllOf(HasSubstr("'weight' of shard rank 1 has another"), HasSubstr("gather codec")));
  });
}

TEST(GatherCodecsOfNothing, AreNotAskedFor) {
  on_ranks_of(2, [](int64_t, const DeviceMesh& mesh) {
    struct Empty : torch::nn::Module {
      Empty() { weight = register_parameter("weight", torch::ones({4, 0})); }
      Tensor weight;
    };
    auto empty = std::make_shared<Empty>();
    fully_shard(empty, mesh, of_matrices(fp8_rows()));
    const torch::NoGradGuard no_grad;
    EXPECT_EQ(empty->weight.clone().numel(), 0);
    EXPECT_EQ(store_codes(*empty), 0);
  });
}

TEST(OwnGatherCodec, OfTheHeader) {
  on_ranks_of(2, [](int64_t, const DeviceMesh& mesh) {
    auto codec = std::make_shared<GatherCodec>();
    codec->name = "my bf16";
    codec->row_bytes = [](int64_t elements) { return 2 * elements; };
    codec->encode = [](const Tensor& values, const Tensor& codes) {
      codes.copy_(values.to(at::kBFloat16).view(at::kByte));
    };
    codec->decode = [](const Tensor& codes, const Tensor& values) {
      values.copy_(codes.contiguous().view(at::kBFloat16));
    };
    auto linear = make_linear(40, 7);
    const auto start = linear->weight.detach().clone();
    fully_shard(linear, mesh, of_matrices(codec));
    const torch::NoGradGuard no_grad;
    EXPECT_TRUE(linear->weight.clone().equal(start.to(at::kBFloat16).to(at::kFloat)));
  });
}

}  // namespace
}  // namespace fsdp::testing
