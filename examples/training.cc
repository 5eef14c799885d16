#include "examples/training.h"

#include "device_mesh/process_group.h"
#include "examples/comparison.h"
#include "examples/phase_times.h"
#include "examples/rank_metrics.h"
#include "examples/report.h"
#include "examples/text_data.h"
#include "examples/transformer_plan.h"
#include "fully_shard/activation_checkpoint.h"
#include "fully_shard/counters.h"
#include "fully_shard/fully_shard.h"
#include "tensor_parallel/parallelize_module.h"

#include <torch/torch.h>

#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace examples {
namespace {

constexpr int64_t kHeldOutBatches = 8;

template <class... Args>
std::string format(const char* pattern, Args... args) {
  char line[512];
  std::snprintf(line, sizeof(line), pattern, args...);
  return line;
}

// The same initial weights on every rank.
Transformer make_model(const TrainingOptions& options) {
  torch::manual_seed(options.seed);
  Transformer model(options.model);
  model->to(options.device);
  return model;
}

// The same weights, computed when the model is sharded.
Transformer make_deferred_model(const TrainingOptions& options) {
  torch::manual_seed(options.seed);
  return fsdp::deferred_init([&] { return Transformer(options.model); });
}

// The embedding, every block and the head are units; the root takes what is left, the
// last norm.
void shard(Transformer& model, const fsdp::DeviceMesh& mesh,
           const fsdp::FullyShardOptions& options) {
  fsdp::fully_shard(model->embedding, mesh, options);
  for (auto& block : model->blocks) fsdp::fully_shard(block, mesh, options);
  fsdp::fully_shard(model->head, mesh, options);
  fsdp::fully_shard(model, mesh, options);
}

void parallelize(Transformer& model, const fsdp::DeviceMesh& tp, const TrainingOptions& options) {
  const int64_t head_width = options.model.width / options.model.heads;
  fsdp::parallelize_module(model, tp, transformer_plan(head_width, options.sequence_parallel));
}

fsdp::DeviceMesh data_mesh_of(const TrainingOptions& options, const fsdp::DeviceMesh& mesh) {
  return options.replicas > 1 ? mesh[{"replicate", "dp"}] : mesh["dp"];
}

void checkpoint_blocks(Transformer& model) {
  model->around_block = [](const auto& run, const torch::Tensor& input) {
    return fsdp::checkpoint(run, input);
  };
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const TrainingOptions& options,
                                                        Transformer& model) {
  switch (options.optimizer) {
    case OptimizerKind::kAdamW:
      return std::make_unique<torch::optim::AdamW>(model->parameters(),
                                                   torch::optim::AdamWOptions(options.lr));
    case OptimizerKind::kSgd:
      return std::make_unique<torch::optim::SGD>(model->parameters(),
                                                 torch::optim::SGDOptions(options.lr));
  }
  return nullptr;
}

double parameter_bytes(const torch::nn::Module& model) {
  double bytes = 0;
  for (const auto& parameter : model.parameters()) bytes += static_cast<double>(parameter.nbytes());
  return bytes;
}

// Bytes that are no printable ASCII, as an early model writes them, would garble the
// terminal.
std::string printable(std::string text) {
  for (char& byte : text) {
    if ((byte < ' ' && byte != '\n' && byte != '\t') || byte > '~') byte = '?';
  }
  return text;
}

class Trainer {
 public:
  Trainer(const TrainingOptions& options, const fsdp::DeviceMesh& mesh)
      : options_(options),
        mesh_(mesh),
        data_mesh_(data_mesh_of(options, mesh)),
        data_rank_(mesh.rank() / options.tp),
        data_(options.data, options.seed),
        model_(options.deferred_init ? make_deferred_model(options) : make_model(options)),
        unsharded_bytes_(parameter_bytes(*model_)),
        checkpointing_(options.checkpoints),
        times_([this] { return fsdp::counters(data_mesh_).wait_seconds; }),
        report_(mesh.rank(), options.steps, options.batch * options.tokens * data_mesh_.size()) {
    if (options.tp > 1) parallelize(model_, mesh["tp"], options);
    shard(model_, data_mesh_, options.sharding);
    fsdp::materialize(*model_);
    optimizer_ = make_optimizer(options, model_);  // over the shards
    if (options.checkpoint_activations) checkpoint_blocks(model_);
    if (!options.compare) return;
    auto twin = make_model(options);
    auto twin_optimizer = make_optimizer(options, twin);
    comparison_.emplace(std::move(twin), std::move(twin_optimizer),
                        options.tp > 1 ? Rounding::kEverywhere : Rounding::kInSumsOverRanks);
  }

  int run() {
    introduce();
    const int64_t done = resume();
    validate(done);
    std::vector<RankMetrics> metrics;
    for (int64_t step = done + 1; step <= options_.steps; ++step) {
      metrics = train_step(step);
      checkpointing_.save_if_due(step, options_.steps, model_, optimizer_);
      std::optional<double> unsharded;
      if (comparison_) unsharded = comparison_->unsharded_loss();
      report_.step(step, metrics, unsharded, checkpointing_.status());
      const bool last = step == options_.steps;
      if (last || (options_.validate_every > 0 && step % options_.validate_every == 0))
        validate(step);
    }
    checkpointing_.finish();
    generate();
    report_.time_table(times_);
    if (!metrics.empty()) report_.memory_table(metrics, unsharded_bytes_);
    return comparison_ ? conclude_comparison() : 0;
  }

 private:
  // The steps that were done before.
  int64_t resume() {
    const int64_t done = checkpointing_.resume(model_, optimizer_);
    if (done > 0) report_.say(format("resumed after step %lld", static_cast<long long>(done)));
    report_.start_after(done);
    return done;
  }

  void introduce() {
    report_.say(format(
        "%.2f M parameters on %lld rank(s), %.1f MB of text to train on, %.1f MB held out (%s)",
        unsharded_bytes_ / 4e6, static_cast<long long>(mesh_.size()), data_.training_bytes() / 1e6,
        data_.held_out_bytes() / 1e6, options_.data.c_str()));
  }

  Batch on_device(Batch batch) const {
    return {batch.inputs.to(options_.device), batch.targets.to(options_.device)};
  }

  std::vector<RankMetrics> train_step(int64_t step) {
    auto batch = times_.measure(Phase::kData, [&] {
      return on_device(data_.training_batch(step, data_rank_, options_.batch, options_.tokens));
    });
    auto loss = times_.measure(Phase::kForward, [&] {
      return next_token_loss(model_->forward(batch.inputs), batch.targets);
    });
    times_.measure(Phase::kBackward, [&] { loss.backward(); });
    if (comparison_) times_.measure(Phase::kUnsharded, [&] { compare_backward(step); });
    times_.measure(Phase::kOptimizer, [&] {
      optimizer_->step();
      optimizer_->zero_grad();
    });
    auto metrics = times_.measure(
        Phase::kMetrics, [&] { return exchange(own_metrics(loss.item<double>()), mesh_); });
    if (comparison_) comparison_->record_sharded_loss(mean_loss(metrics));
    return metrics;
  }

  RankMetrics own_metrics(double loss) const {
    const auto training = times_.training();
    const auto counters = fsdp::counters(data_mesh_);
    return {.loss = loss,
            .training_seconds = training.seconds,
            .waiting_seconds = training.waiting,
            .shard_bytes = static_cast<double>(counters.sharded_bytes),
            .sharding_peak_bytes = static_cast<double>(counters.peak_bytes),
            .resident_peak_bytes = resident_peak_bytes()};
  }

  void compare_backward(int64_t step) {
    std::vector<Batch> micro_batches;
    for (int64_t rank = 0; rank < data_mesh_.size(); ++rank) {
      micro_batches.push_back(
          on_device(data_.training_batch(step, rank, options_.batch, options_.tokens)));
    }
    comparison_->follow(*model_);
    comparison_->forward_backward(micro_batches);
    if (step == 1) compare_first_step();
    comparison_->optimizer_step();
  }

  void compare_first_step() {
    const auto gradients = comparison_->compare_gradients(*model_);
    const auto parameters = comparison_->compare_parameters_after_sgd(*model_, options_.lr);
    report_.say("step 1, gradients against the unsharded model's: " + to_string(gradients));
    report_.say("step 1, parameters after one SGD step:           " + to_string(parameters));
    first_step_agrees_ = gradients.out_of_bound == 0 && parameters.out_of_bound == 0;
  }

  void validate(int64_t step) {
    const auto metrics = times_.measure(Phase::kValidation, [&] {
      torch::NoGradGuard no_grad;
      double sum = 0;
      for (int64_t i = 0; i < kHeldOutBatches; ++i) {
        auto batch =
            on_device(data_.held_out_batch(i, data_rank_, options_.batch, options_.tokens));
        sum += next_token_loss(model_->forward(batch.inputs), batch.targets).item<double>();
      }
      return exchange(own_metrics(sum / kHeldOutBatches), mesh_);
    });
    report_.say(format("validation loss after %lld steps: %.4f", static_cast<long long>(step),
                       mean_loss(metrics)));
  }

  // A collective: every rank generates, from the same random numbers, and rank 0 prints.
  void generate() {
    if (options_.generate == 0) return;
    torch::manual_seed(options_.seed);
    auto text = times_.measure(Phase::kGeneration, [&] {
      return fsdp::full_tensor(model_->generate(encode(options_.prompt).to(options_.device),
                                                options_.generate, options_.temperature));
    });
    report_.say("\ngenerated by the sharded model:\n" + printable(decode(text)));
  }

  int conclude_comparison() {
    const double largest = comparison_->largest_loss_difference();
    const bool agrees = first_step_agrees_ && largest <= kLossTolerance;
    report_.say(
        format("\ncompared with the unsharded model over %lld steps: losses differ by at most %.3g "
               "relative "
               "(allowed: %.3g): %s",
               static_cast<long long>(options_.steps), largest, kLossTolerance,
               agrees ? "agree" : "DIFFER"));
    return agrees ? 0 : 1;
  }

  const TrainingOptions options_;
  const fsdp::DeviceMesh mesh_;       // all ranks
  const fsdp::DeviceMesh data_mesh_;  // those that have batches of their own
  const int64_t data_rank_;
  const TextData data_;
  Transformer model_;
  const double unsharded_bytes_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::optional<Comparison> comparison_;
  bool first_step_agrees_ = true;
  Checkpointing checkpointing_;
  PhaseTimes times_;
  Report report_;
};

// {"replicate", "dp", "tp"}, without those that were not asked for.
fsdp::DeviceMesh mesh_of(const TrainingOptions& options, int64_t ranks) {
  check_mesh(options, ranks);
  std::vector<int64_t> shape;
  std::vector<std::string> names;
  const auto add = [&](int64_t size, const char* name) {
    shape.push_back(size);
    names.emplace_back(name);
  };
  if (options.replicas > 1) add(options.replicas, "replicate");
  add(ranks / options.replicas / options.tp, "dp");
  if (options.tp > 1) add(options.tp, "tp");
  return fsdp::init_device_mesh(options.device, shape, names);
}

}  // namespace

void check_mesh(const TrainingOptions& options, int64_t ranks) {
  TORCH_CHECK_VALUE(ranks % options.tp == 0, "--tp: ", options.tp,
                    ", allowed are divisors of the number of ranks, ", ranks);
  const int64_t data_ranks = ranks / options.tp;
  TORCH_CHECK_VALUE(data_ranks % options.replicas == 0, "--replicas: ", options.replicas,
                    ", allowed are divisors of the number of ranks",
                    options.tp > 1 ? " by --tp, " : ", ", data_ranks);
  TORCH_CHECK_VALUE(options.sharding.outer == fsdp::Outer::kReplicate || options.replicas > 1,
                    "--shard_optimizer needs 2 or more replicas (--replicas, --mesh)");
}

int train(const TrainingOptions& options) {
  const auto place = fsdp::launch_environment();
  std::optional<c10::DeviceGuard> device;
  if (options.device == c10::DeviceType::CUDA) {
    device.emplace(c10::Device(options.device, static_cast<c10::DeviceIndex>(place.local_rank)));
  }
  fsdp::ProcessGroupOptions group;
  group.backend = options.device == c10::DeviceType::CUDA ? "nccl" : "gloo";
  fsdp::init_process_group(group);
  const int exit_code = Trainer(options, mesh_of(options, place.world_size)).run();
  fsdp::destroy_process_group();
  return exit_code;
}

}  // namespace examples
