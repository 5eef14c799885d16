// One rank's parameters and buffers for all, before they are sharded.
#include "fully_shard/fully_shard.h"
#include "tests/support/errors.h"
#include "tests/support/full_value.h"
#include "tests/support/start_values.h"
#include "tests/support/with_environment.h"
#include "tests/support/worlds.h"

#include <ATen/record_function.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::Tensor;
using torch::nn::Linear;

std::vector<Tensor> states_of(const torch::nn::Module& module) {
  auto states = module.parameters();
  for (const auto& buffer : module.buffers()) states.push_back(buffer);
  return states;
}

// Many kinds of parameters and buffers, whose elements tell the rank that made them.
struct Assorted : torch::nn::Module {
  explicit Assorted(int64_t rank) {
    register_module("again", first);
    const torch::NoGradGuard no_grad;
    auto start = 51 * rank;
    for (auto& state : states_of(*this)) {
      const auto values = (torch::arange(state.numel()) + start++).view(state.sizes());
      state.copy_(state.scalar_type() == torch::kBool ? values.remainder(2) : values);
    }
  }

  static constexpr int64_t kBytes = 4 * (3 * 5 + 5) + 2 * 7 + 8 * 4 + 8 + 9 + 4 * 8;

  Linear first = register_module("first", Linear(3, 5));
  Tensor tied = register_parameter("tied", first->weight);
  Tensor half = register_parameter("half", torch::zeros({7}, torch::kHalf));
  Tensor frozen = register_parameter("frozen", torch::zeros({2, 2}, torch::kDouble), false);
  Tensor steps = register_buffer("steps", torch::zeros({}, torch::kLong));
  Tensor mask = register_buffer("mask", torch::zeros({3, 3}, torch::kBool));
  Tensor transposed = register_buffer("transposed", torch::zeros({4, 2}).t());
  Tensor empty = register_buffer("empty", torch::zeros({0, 3}));
};

void expect_made_by(int64_t rank, const Assorted& module) {
  const auto states = states_of(module), expected = states_of(Assorted(rank));
  ASSERT_EQ(states.size(), expected.size());
  for (size_t i = 0; i < states.size(); ++i)
    EXPECT_TRUE(torch::equal(states[i], expected[i])) << "state " << i;
}

class BroadcastStates : public Worlds {};

TEST_P(BroadcastStates, AreThoseOfTheSourceOnEveryRank) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    for (const int64_t src : {int64_t{0}, world() - 1}) {
      Assorted module(rank);
      broadcast_states(module, mesh, src);
      expect_made_by(src, module);
    }
  });
}

TEST_P(BroadcastStates, AreWrittenInPlaceWhateverRequiresGrad) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    Assorted module(rank);
    const auto* const memory = module.first->weight.const_data_ptr();
    const auto version = module.first->weight._version();
    broadcast_states(module, mesh);
    EXPECT_EQ(module.first->weight.const_data_ptr(), memory);
    EXPECT_EQ(module.first->weight._version() > version, rank != 0) << "known to live graphs";
    EXPECT_TRUE(module.first->weight.is_leaf() && module.first->weight.requires_grad());
    EXPECT_FALSE(module.frozen.requires_grad());
    EXPECT_TRUE(module.parameters(false)[0].is_same(module.first->weight)) << "still tied";
  });
}

TEST_P(BroadcastStates, MakeRanksThatStartedApartTrainable) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    auto layer = make_linear(4, 6);
    {
      const torch::NoGradGuard no_grad;
      layer->weight.add_(rank);
    }
    broadcast_states(*layer, mesh, world() - 1);
    fully_shard(layer, mesh);
    EXPECT_NO_THROW(layer(torch::ones({1, 4})).sum().backward()) << "compares start values";
    EXPECT_TRUE(torch::equal(full_value(layer->parameters()[0]),
                             make_linear(4, 6)->weight.detach() + (world() - 1)));
  });
}

thread_local int64_t broadcasts, broadcast_bytes;

std::unique_ptr<at::ObserverContext> count_broadcast(const at::RecordFunction& call) {
  if (std::string_view(call.name()) != "c10d::broadcast_") return nullptr;
  ++broadcasts;
  for (const auto& tensor : call.inputs()[0].toTensorVector())
    broadcast_bytes += static_cast<int64_t>(tensor.nbytes());
  return nullptr;
}

void count_broadcasts(const std::function<void()>& body) {
  broadcasts = broadcast_bytes = 0;
  const auto handle =
      at::addThreadLocalCallback(at::RecordFunctionCallback(&count_broadcast).needsInputs(true));
  body();
  at::removeCallback(handle);
}

TEST_P(BroadcastStates, AreSentOnceInOneMessage) {
  const WithEnvironment c10d_sends("FSDP_PEER_MEMORY", "off");
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    Assorted module(rank);
    count_broadcasts([&] { broadcast_states(module, mesh); });
    EXPECT_EQ(broadcasts, world() == 1 ? 0 : 1);
    EXPECT_EQ(broadcast_bytes, world() == 1 ? 0 : Assorted::kBytes);
  });
}

INSTANTIATE_WORLDS(BroadcastStates, 1, 2, 3);

TEST(BroadcastStatesOverReplicas, AreThoseOfAnySourceAndCrossEachDimensionOnce) {
  const WithEnvironment c10d_sends("FSDP_PEER_MEMORY", "off");
  run_ranks(4, [](int64_t rank) {
    const auto mesh = init_device_mesh(torch::kCPU, {2, 2}, {"replicate", "shard"});
    for (int64_t src = 0; src < 4; ++src) {
      Assorted module(rank);
      count_broadcasts([&] { broadcast_states(module, mesh, src); });
      expect_made_by(src, module);
      EXPECT_EQ(broadcasts, rank % 2 == src % 2 ? 2 : 1) << "only one rank of each replica";
    }
    auto layer = make_linear(4, 6);
    {
      const torch::NoGradGuard no_grad;
      layer->weight.add_(rank);
    }
    broadcast_states(*layer, mesh, 2);
    fully_shard(layer, mesh);
    EXPECT_TRUE(
        torch::equal(full_value(layer->parameters()[0]), make_linear(4, 6)->weight.detach() + 2));
  });
}

TEST(BroadcastStatesOverASlice, ReachItsRanksOnly) {
  run_ranks(4, [](int64_t rank) {
    const auto grid = init_device_mesh(torch::kCPU, {2, 2}, {"pp", "dp"});
    Assorted module(rank);
    broadcast_states(module, grid["dp"], /*src=*/1);
    expect_made_by(rank < 2 ? 1 : 3, module);
  });
}

class BroadcastStatesThat : public Worlds {
 protected:
  bool is_last(int64_t rank) const { return rank == world() - 1; }
  // "rank 2 has ", of the last rank.
  std::string last_has() const { return "rank " + std::to_string(world() - 1) + " has "; }
};

// On every rank, with `module` as it was and the group as good as before.
template <class Matcher>
void expect_refused(torch::nn::Module& module, const DeviceMesh& mesh, const Matcher& matcher,
                    int64_t src = 0) {
  std::vector<Tensor> before;
  for (const auto& state : states_of(module))
    before.push_back(is_dtensor(state) || state.is_meta() ? Tensor() : state.clone());
  EXPECT_THAT(message_of<c10::ValueError>([&] { broadcast_states(module, mesh, src); }), matcher);
  for (size_t i = 0; i < before.size(); ++i)
    EXPECT_TRUE(!before[i].defined() || torch::equal(states_of(module)[i], before[i])) << i;
  Assorted good(mesh.rank());
  broadcast_states(good, mesh);
  expect_made_by(0, good);
}

TEST_P(BroadcastStatesThat, DifferInShapeAreNamedOnEveryRank) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    auto layer = make_linear(4, is_last(rank) ? 6 : 5);
    expect_refused(*layer, mesh,
                   AllOf(HasSubstr(last_has() + "parameter 'weight' of shape [6, 4]"),
                         HasSubstr("rank 0 has parameter 'weight' of shape [5, 4]")));
  });
}

TEST_P(BroadcastStatesThat, DifferInDtypeNameOrNumberAreNamedOnEveryRank) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    auto layer = make_linear(4, 5);
    if (is_last(rank)) layer->to(torch::kDouble);
    expect_refused(*layer, mesh,
                   HasSubstr(last_has() + "parameter 'weight' of shape [5, 4] and "
                                          "dtype Double"));
    auto named = make_linear(4, 5);
    named->register_buffer(is_last(rank) ? "scale" : "shift", torch::ones({2}));
    expect_refused(*named, mesh, HasSubstr(last_has() + "buffer 'scale'"));
    auto more = make_linear(4, 5);
    if (!is_last(rank)) more->register_parameter("more", torch::ones({2}));
    expect_refused(*more, mesh,
                   AllOf(HasSubstr(last_has() + "nothing more"), HasSubstr("parameter 'more'")));
  });
}

TEST_P(BroadcastStatesThat, OneRankCannotTakeAreNamedOnEveryRank) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    auto late = make_linear(4, 5);
    late->register_buffer("late", torch::ones({2}, is_last(rank) ? torch::kMeta : torch::kCPU));
    expect_refused(*late, mesh, HasSubstr("buffer 'late' is on the meta device"));
    auto expanded = make_linear(4, 5);
    expanded->register_buffer(
        "row", is_last(rank) ? torch::ones({1, 4}).expand({3, 4}) : torch::ones({3, 4}));
    expect_refused(*expanded, mesh, AllOf(HasSubstr("buffer 'row'"), HasSubstr("share memory")));
    auto sparse = make_linear(4, 5);
    if (is_last(rank)) sparse->register_buffer("sparse", torch::eye(3).to_sparse());
    EXPECT_THAT(message_of<c10::ValueError>([&] { broadcast_states(*sparse, mesh); }),
                AllOf(HasSubstr("buffer 'sparse'"), HasSubstr("layout")));
  });
}

TEST_P(BroadcastStatesThat, AreShardedAlreadyAreRefusedByName) {
  on_ranks([&](int64_t, const DeviceMesh& mesh) {
    torch::nn::Sequential model(make_linear(4, 4), make_linear(4, 4));
    auto second = model[1]->as<Linear>();
    fully_shard(*second, mesh);
    expect_refused(*model, mesh,
                   AllOf(HasSubstr("parameter '1.weight'"), HasSubstr("sharded already"),
                         HasSubstr("before fully_shard")));
    auto tied = make_linear(4, 4);
    tied->register_parameter("member", second->weight);
    EXPECT_THAT(message_of<c10::ValueError>([&] { broadcast_states(*tied, mesh); }),
                AllOf(HasSubstr("parameter 'member'"), HasSubstr("sharded already")));
  });
}

TEST_P(BroadcastStatesThat, ComeFromNoRankOrFromSeveralAreRefused) {
  on_ranks([&](int64_t rank, const DeviceMesh& mesh) {
    auto layer = make_linear(4, 5);
    expect_refused(*layer, mesh, HasSubstr("src is 7; expected 0 to"), /*src=*/7);
    expect_refused(*layer, mesh, HasSubstr("src is -1; expected 0 to"), is_last(rank) ? -1 : 0);
    expect_refused(*layer, mesh, HasSubstr(last_has() + "src = 1"), is_last(rank) ? 1 : 0);
  });
}

INSTANTIATE_WORLDS(BroadcastStatesThat, 2, 3);

}  // namespace
}  // namespace fsdp::testing
