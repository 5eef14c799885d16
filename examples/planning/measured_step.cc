#include "examples/planning/measured_step.h"

#include "examples/optimizer.h"
#include "examples/sharded_model.h"
#include "fully_shard/clip_grad_norm.h"
#include "fully_shard/counters.h"
#include "fully_shard/fully_shard.h"
#include "tensor_parallel/communication_log.h"

#include <torch/torch.h>

#include <map>
#include <memory>
#include <utility>

namespace examples {
namespace {

// Of the dimensions that shard parameters, or hold replicas of them.
std::vector<Traffic> traffic_of_units(const fsdp::DeviceMesh& mesh, const fsdp::Counters& before,
                                      const fsdp::Counters& after) {
  const auto& names = mesh.dim_names();
  std::vector<Traffic> traffic;
  const auto add = [&](const std::string& dim, const char* collective, auto count, auto bytes) {
    const Traffic one{dim, collective, after.*count - before.*count, after.*bytes - before.*bytes};
    if (one.count > 0) traffic.push_back(one);
  };
  using C = fsdp::Counters;
  add(names.back(), "all-gather", &C::all_gathers, &C::all_gather_bytes);
  add(names.back(), "reduce-scatter", &C::reduce_scatters, &C::reduce_scatter_bytes);
  add(names.front(), "all-reduce", &C::all_reduces, &C::all_reduce_bytes);
  add(names.front(), "all-gather", &C::outer_all_gathers, &C::outer_all_gather_bytes);
  add(names.front(), "reduce-scatter", &C::outer_reduce_scatters, &C::outer_reduce_scatter_bytes);
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
    const auto before = fsdp::counters(data_mesh_);
    const double flops = flops_so_far();
    const fsdp::CommunicationLog log;
    step();
    const auto after = fsdp::counters(data_mesh_);
    measured_.flops = flops_so_far() - flops;
    measured_.memory.sharding_peak = after.peak_bytes;
    measured_.traffic = traffic_of_units(data_mesh_, before, after);
    for (auto& one : traffic_of_dtensors(mesh_, log.entries())) measured_.traffic.push_back(one);
    return measured_;
  }

 private:
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
    for (int64_t backward = 0; backward < options_.accumulate; ++backward) {
      units.set_requires_gradient_sync(backward + 1 == options_.accumulate);
      const int64_t before_forward = bytes_beside_units();
      torch::Tensor loss;
      run(StepPhase::kForward,
          [&] { loss = next_token_loss(sharded_.model->forward(tokens_), tokens_); });
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

}  // namespace examples
