#include "programs/planner/measured_step.h"

#include "fully_shard/clip_grad_norm.h"
#include "fully_shard/counters.h"
#include "fully_shard/fully_shard.h"
#include "programs/trainer/setup/optimizer.h"
#include "programs/trainer/setup/sharded_model.h"
#include "tensor_parallel/communication_log.h"

#include <torch/torch.h>

#include <map>
#include <memory>
#include <optional>
#include <utility>

namespace programs {
namespace {

// What units have sent until a step begins and until it ends, and in its forwards.
struct CountersOfStep {
  fsdp::Counters before, after;
  Traffic gathered_by_forwards;
};

// What was counted between two times, of one kind.
Traffic between(const fsdp::Counters& begin, const fsdp::Counters& end,
                int64_t fsdp::Counters::*count, int64_t fsdp::Counters::*bytes) {
  return {.count = end.*count - begin.*count, .bytes = end.*bytes - begin.*bytes};
}

Traffic gathers_between(const fsdp::Counters& begin, const fsdp::Counters& end) {
  return between(begin, end, &fsdp::Counters::all_gathers, &fsdp::Counters::all_gather_bytes);
}

// Of the dimensions that shard parameters, or hold replicas of them. Backwards gather
// from `neighbours` where parameters stay with these.
std::vector<Traffic> traffic_of_units(const fsdp::DeviceMesh& mesh, const CountersOfStep& counters,
                                      std::optional<int64_t> neighbours) {
  using C = fsdp::Counters;
  const auto& names = mesh.dim_names();
  const int64_t shards = mesh.size(-1), replicas = mesh.size(0);
  const auto& [before, after, by_forwards] = counters;
  std::vector<Traffic> traffic;
  const auto add = [&](const std::string& dim, const char* collective, int64_t group, Traffic one) {
    if (one.count == 0) return;
    one.dim = dim;
    one.collective = collective;
    one.group = group;
    traffic.push_back(one);
  };
  auto gathers = gathers_between(before, after);
  if (neighbours) {
    add(names.back(), "all-gather", shards, by_forwards);
    gathers.count -= by_forwards.count;
    gathers.bytes -= by_forwards.bytes;
  }
  add(names.back(), "all-gather", neighbours.value_or(shards), gathers);
  add(names.back(), "reduce-scatter", shards,
      between(before, after, &C::reduce_scatters, &C::reduce_scatter_bytes));
  add(names.front(), "all-reduce", replicas,
      between(before, after, &C::all_reduces, &C::all_reduce_bytes));
  add(names.front(), "all-gather", replicas,
      between(before, after, &C::outer_all_gathers, &C::outer_all_gather_bytes));
  add(names.front(), "reduce-scatter", replicas,
      between(before, after, &C::outer_reduce_scatters, &C::outer_reduce_scatter_bytes));
  return traffic;
}

// What this rank gets for what it gives.
int64_t received_bytes(const fsdp::Communication& sent, int64_t ranks) {
  if (sent.collective == "all-gather") return sent.bytes * (ranks - 1);
  if (sent.collective == "all-reduce") return 2 * sent.bytes * (ranks - 1) / ranks;
  return sent.bytes * (ranks - 1) / ranks;
}

std::vector<Traffic> traffic_of_dtensors(const fsdp::DeviceMesh& mesh,
                                         const std::vector<fsdp::Communication>& log) {
  std::map<std::pair<std::string, std::string>, Traffic> sums;
  for (const auto& sent : log) {
    auto& sum = sums[{sent.mesh_dim, sent.collective}];
    sum.dim = sent.mesh_dim;
    sum.collective = sent.collective;
    sum.group = mesh[sent.mesh_dim].size();
    ++sum.count;
    sum.bytes += received_bytes(sent, mesh[sent.mesh_dim].size());
  }
  std::vector<Traffic> traffic;
  for (auto& [key, sum] : sums) traffic.push_back(std::move(sum));
  return traffic;
}

// A model, its optimizer and a batch.
class StepRun {
 public:
  StepRun(const std::function<Transformer()>& make, const TrainingOptions& options,
          const fsdp::DeviceMesh& mesh, const DeviceCounters& device)
      : options_(options),
        mesh_(mesh),
        data_mesh_(data_mesh_of(options, mesh)),
        device_(device),
        before_model_(device.memory()),
        sharded_(shard_model(make(), options, mesh)),
        optimizer_(make_optimizer(options, sharded_.model)),
        tokens_(torch::zeros({options.batch, options.tokens}, torch::kLong)
                    .to(fsdp::local_device(mesh))) {}

  MeasuredStep measure() {
    measured_.unsharded_bytes = sharded_.unsharded_bytes;
    measured_.memory.parameters = device_.memory() - before_model_ - int64_t(tokens_.nbytes());
    step();
    measured_.memory.optimizer = optimizer_bytes_;
    step();
    measured_.memory.peak = 0;
    fsdp::reset_peak(data_mesh_);
    CountersOfStep counters{.before = fsdp::counters(data_mesh_)};
    const double flops = flops_so_far();
    const fsdp::CommunicationLog log;
    step();
    counters.gathered_by_forwards = gathered_by_forwards_;
    counters.after = fsdp::counters(data_mesh_);
    measured_.flops = flops_so_far() - flops;
    measured_.memory.sharding_peak = counters.after.peak_bytes;
    measured_.traffic = traffic_of_units(data_mesh_, counters, neighbours());
    for (auto& one : traffic_of_dtensors(mesh_, log.entries())) measured_.traffic.push_back(one);
    return measured_;
  }

 private:
  std::optional<int64_t> neighbours() const {
    const auto& reshard = options_.sharding.reshard_after_forward;
    return reshard ? reshard->world() : std::nullopt;
  }

  double flops_so_far() const { return device_.flops ? device_.flops() : 0; }

  // Bytes that are there but for what units hold beyond their shards.
  int64_t bytes_beside_units() const {
    const auto held = fsdp::counters(data_mesh_);
    return device_.memory() - held.unsharded_bytes - held.post_forward_bytes - held.staging_bytes -
           held.gradient_bytes;
  }

  template <class Work>
  void run(StepPhase phase, const Work& work) {
    device_.reset_peak();
    work();
    if (device_.peak() <= measured_.memory.peak) return;
    measured_.memory.peak = device_.peak();
    measured_.memory.peak_phase = phase;
  }

  void step() {
    auto units = fsdp::get_fsdp_module(*sharded_.model);
    const int64_t before = bytes_beside_units();
    gathered_by_forwards_ = {};
    for (int64_t backward = 0; backward < options_.accumulate; ++backward) {
      units.set_requires_gradient_sync(backward + 1 == options_.accumulate);
      const int64_t before_forward = bytes_beside_units();
      const auto counters = fsdp::counters(data_mesh_);
      torch::Tensor loss;
      run(StepPhase::kForward,
          [&] { loss = next_token_loss(sharded_.model->forward(tokens_), tokens_); });
      const auto gathered = gathers_between(counters, fsdp::counters(data_mesh_));
      gathered_by_forwards_.count += gathered.count;
      gathered_by_forwards_.bytes += gathered.bytes;
      measured_.memory.activations = bytes_beside_units() - before_forward;
      run(StepPhase::kBackward, [&] { (loss / options_.accumulate).backward(); });
    }
    measured_.memory.gradients = bytes_beside_units() - before;
    run(StepPhase::kOptimizer, [&] { optimizer_step(); });
  }

  void optimizer_step() {
    if (options_.clip > 0) fsdp::clip_grad_norm_(sharded_.model->parameters(), options_.clip);
    const int64_t before = device_.memory();
    optimizer_->step();
    optimizer_bytes_ = device_.memory() - before;
    optimizer_->zero_grad();
  }

  const TrainingOptions& options_;
  const fsdp::DeviceMesh mesh_, data_mesh_;
  const DeviceCounters& device_;
  const int64_t before_model_;
  ShardedModel sharded_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  torch::Tensor tokens_;
  int64_t optimizer_bytes_ = 0;  // that the last step made
  Traffic gathered_by_forwards_;
  MeasuredStep measured_;
};

}  // namespace

const char* name(StepPhase phase) {
  switch (phase) {
    case StepPhase::kForward:
      return "forward";
    case StepPhase::kBackward:
      return "backward";
    case StepPhase::kOptimizer:
      return "optimizer";
  }
  return "";
}

MeasuredStep measure_step(const std::function<Transformer()>& make, const TrainingOptions& options,
                          const fsdp::DeviceMesh& mesh, const DeviceCounters& device) {
  return StepRun(make, options, mesh, device).measure();
}

}  // namespace programs
