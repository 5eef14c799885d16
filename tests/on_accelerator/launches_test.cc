// What a sharded step asks of a device beside what the model itself does: operators and
// collectives are launched one by one, which costs the host, so their number must depend
// neither on the number of ranks nor, but for one copy of each gradient, on that of the
// parameters; and the host waits for none of them.
#include "fully_shard/activation_checkpoint.h"
#include "fully_shard/clip_grad_norm.h"
#include "fully_shard/fsdp_module.h"
#include "fully_shard/fully_shard.h"
#include "tests/on_accelerator/program.h"
#include "tests/simulated_accelerator/install.h"
#include "tests/simulated_accelerator/move_module.h"
#include "tests/support/default_generator.h"

#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim/sgd.h>

#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

constexpr int kCountedSteps = 3;

// Of six parameters.
struct MlpBlock : torch::nn::Module {
  MlpBlock() {
    register_module("up", up);
    register_module("norm", norm);
    register_module("down", down);
  }
  at::Tensor forward(const at::Tensor& x) { return down(torch::tanh(norm(up(x)))); }
  torch::nn::Linear up{8, 12}, down{12, 8};
  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({12})};
};

// And two of the root, whose five rows are divided by no number of ranks.
struct TwoBlocks : torch::nn::Module {
  TwoBlocks() {
    register_module("one", one);
    register_module("two", two);
    register_module("head", head);
  }
  std::shared_ptr<MlpBlock> one = std::make_shared<MlpBlock>(), two = std::make_shared<MlpBlock>();
  torch::nn::Linear head{8, 5};
};

std::shared_ptr<TwoBlocks> make_two_blocks() {
  return drawn_from_seed(1, [] { return std::make_shared<TwoBlocks>(); });
}

struct Counted {
  std::string name;
  int64_t launches = 0;  // of the last step, without its optimizer, beside the model's own
  int64_t host_syncs = 0;
  std::vector<int64_t> mesh = {2};
  FullyShardOptions options = {};
  int backwards = 1;  // of a step; the last one reduces
  bool recomputes = false;
  bool clips = false;

  int64_t ranks() const { return mesh.size() == 1 ? mesh[0] : mesh[0] * mesh[1]; }
};

void PrintTo(const Counted& counted, std::ostream* out) { *out << counted.name; }

at::Tensor output_of(TwoBlocks& model, const at::Tensor& x, bool recomputes) {
  auto hidden = x;
  for (const auto& block : {model.one, model.two}) {
    const auto run = [block](const at::Tensor& input) { return block->forward(input); };
    hidden = recomputes ? checkpoint(run, hidden) : run(hidden);
  }
  return model.head(hidden);
}

int64_t launches_now(c10::Device device) {
  return device.is_cpu() ? 0 : simulated::counters_now(device).launches.total;
}

// A step; `launches`: those between zero_grad() and the optimizer.
template <class BeforeBackward, class BeforeOptimizer>
void take_step(TwoBlocks& model, const at::Tensor& x, const Counted& counted,
               const BeforeBackward& before_backward, const BeforeOptimizer& before_optimizer,
               int64_t& launches) {
  torch::optim::SGD optimizer(model.parameters(), 1e-1);
  optimizer.zero_grad();
  const auto before = launches_now(x.device());
  for (int micro = 0; micro < counted.backwards; ++micro) {
    before_backward(micro);
    output_of(model, x, counted.recomputes).to(at::kFloat).pow(2).sum().backward();
  }
  before_optimizer();
  launches = launches_now(x.device()) - before;
  optimizer.step();
}

at::Tensor batch_of(int64_t rank) {
  return torch::linspace(-1, 1 + static_cast<double>(rank), 24).view({3, 8});
}

int64_t launches_of_unsharded(const Counted& counted) {
  int64_t launches = 0;
  simulated::run_in({}, [&] {
    const auto model = make_two_blocks();
    simulated::move_to(*model, simulated::kDevice);
    const auto x = batch_of(0).to(simulated::kDevice);
    take_step(
        *model, x, counted, [](int) {}, [] {}, launches);
  });
  return launches;
}

TrainingProgram counting(const Counted& counted, std::vector<int64_t>& launches) {
  return [&counted, &launches](ProgramRank& rank) {
    const auto mesh = init_device_mesh(rank.device().type(), counted.mesh);
    const auto model = make_two_blocks();
    for (const auto& block : {model->one, model->two}) fully_shard(*block, mesh, counted.options);
    fully_shard(*model, mesh, counted.options);
    auto root = get_fsdp_module(*model);
    const auto synchronize = [&](int micro) {
      root.set_requires_gradient_sync(micro == counted.backwards - 1);
    };
    const auto clip = [&] {
      if (counted.clips) rank.keep(clip_grad_norm_(model->parameters(), 0.1));
    };
    const auto x = batch_of(rank.rank()).to(rank.device());
    rank.steps(kCountedSteps, [&] {
      take_step(*model, x, counted, synchronize, clip, launches[static_cast<size_t>(rank.rank())]);
    });
    rank.keep_parameters(*model);
  };
}

class Launches : public ::testing::TestWithParam<Counted> {
 protected:
  static void SetUpTestSuite() { simulated::install(); }
};

TEST_P(Launches, AreAsManyAsSaidAndTheBitsAreThoseOfCpu) {
  const auto& counted = GetParam();
  const auto ranks = counted.ranks();
  std::vector<int64_t> launches(static_cast<size_t>(ranks), 0);
  const auto program = counting(counted, launches);
  const auto of_model = launches_of_unsharded(counted);
  const auto expected = run_on_cpu(program, ranks);
  for (const auto& schedule : simulated::schedules(counted.mesh.size() == 1 ? 5 : 8)) {
    SCOPED_TRACE(to_string(schedule));
    const auto run = run_on_devices(program, ranks, schedule);
    EXPECT_EQ(faults_of(run, expected, counted.host_syncs), "");
    for (const auto each : launches) EXPECT_EQ(each - of_model, counted.launches);
  }
}

std::optional<Shard> last_dimension(const std::string&, const at::Tensor& parameter) {
  return Shard{.dim = parameter.dim() - 1};
}

const FullyShardOptions kMixed = {
    .mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}};
const FullyShardOptions kMixedOffloaded = {.mp_policy = kMixed.mp_policy,
                                           .offload_policy = {.offload_to_cpu = true}};

INSTANTIATE_TEST_SUITE_P(
    All, Launches,
    ::testing::Values(
        Counted{.name = "TwoRanks", .launches = 23},
        Counted{.name = "FourRanks", .launches = 23, .mesh = {4}},
        Counted{.name = "Hybrid", .launches = 23, .mesh = {2, 2}},
        Counted{.name = "Kept", .launches = 22, .options = {.reshard_after_forward = false}},
        Counted{.name = "ToAWorldOfTwo",
                .launches = 30,
                .mesh = {4},
                .options = {.reshard_after_forward = ReshardAfterForward::to_world(2)}},
        Counted{.name = "LastDimension",
                .launches = 29,
                .options = {.shard_placement_fn = last_dimension}},
        Counted{.name = "Accumulating", .launches = 31, .backwards = 3},
        Counted{.name = "Recomputing", .launches = 23, .recomputes = true},
        Counted{.name = "Clipping", .launches = 42, .clips = true},
        Counted{.name = "MixedPrecision", .launches = 30, .options = kMixed},
        Counted{
            .name = "MixedPrecisionOnFourRanks", .launches = 30, .mesh = {4}, .options = kMixed},
        Counted{.name = "Offloaded",
                .launches = 30,
                .host_syncs = 1,
                .options = {.offload_policy = {.offload_to_cpu = true}}},
        Counted{.name = "MixedPrecisionOffloaded",
                .launches = 37,
                .host_syncs = 1,
                .options = kMixedOffloaded}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace fsdp::testing
