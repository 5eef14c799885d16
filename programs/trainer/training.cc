#include "programs/trainer/training.h"

#include "device_mesh/process_group.h"
#include "dtensor/dtensor.h"
#include "fully_shard/clip_grad_norm.h"
#include "fully_shard/counters.h"
#include "fully_shard/fully_shard.h"
#include "fully_shard/profile.h"
#include "programs/trainer/batch_loss.h"
#include "programs/trainer/comparison.h"
#include "programs/trainer/data/batches.h"
#include "programs/trainer/data/tokenizer.h"
#include "programs/trainer/hugging_face/hugging_face.h"
#include "programs/trainer/report/metrics_file.h"
#include "programs/trainer/report/output_file.h"
#include "programs/trainer/report/phase_times.h"
#include "programs/trainer/report/rank_metrics.h"
#include "programs/trainer/report/report.h"
#include "programs/trainer/report/run_page.h"
#include "programs/trainer/report/training_range.h"
#include "programs/trainer/setup/optimizer.h"
#include "programs/trainer/setup/sharded_model.h"
#include "programs/trainer/setup/training_data.h"
#include "programs/words.h"

#include <c10/util/StringUtil.h>
#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace programs {
namespace {

constexpr int64_t kBlocksOfTokens = 8;  // of a sequence, for each rank that has some of it
constexpr int64_t kHeldOutBatches = 8;  // of as many sequences as a step has

Rounding rounding_of(const TrainingOptions& options, int64_t data_ranks) {
  if (options.tp > 1 || options.ep > 1 || options.cp > 1) return Rounding::kEverywhere;
  const bool sums_twice = options.replicas > 1 && data_ranks > options.replicas;
  return sums_twice ? Rounding::kInSumsOverReplicas : Rounding::kInSumsOverRanks;
}

// "17 4711 2"
std::string numbers_of(const torch::Tensor& tokens) {
  const auto numbers = tokens.to(torch::kCPU).contiguous();
  const auto* const first = numbers.const_data_ptr<int64_t>();
  return c10::Join(" ", std::vector<int64_t>(first, first + numbers.numel()));
}

// How much a step takes beside the shards: of this rank, in bytes, unsharded parameters,
// rows on their way and full gradients at one moment (Counters::peak_bytes), or at most
// that where units are sharded over several meshes. Nobody else calls reset_peak.
class StepPeak {
 public:
  explicit StepPeak(std::vector<fsdp::DeviceMesh> meshes) : meshes_(std::move(meshes)) {}

  // A step begins.
  void begin() {
    before_ = highest();
    for (const auto& mesh : meshes_) fsdp::reset_peak(mesh);
  }
  // Since then.
  int64_t of_step() const {
    int64_t bytes = 0;
    for (const auto& mesh : meshes_) bytes += fsdp::counters(mesh).peak_bytes;
    return bytes;
  }
  // Since the start.
  int64_t highest() const { return std::max(before_, of_step()); }

 private:
  std::vector<fsdp::DeviceMesh> meshes_;
  int64_t before_ = 0;
};

class Trainer {
 public:
  Trainer(const TrainingOptions& options, const fsdp::DeviceMesh& mesh)
      : options_(options),
        mesh_(mesh),
        data_mesh_(data_mesh_of(options, mesh)),
        unit_meshes_(meshes_of_units(options, mesh)),
        data_rank_(mesh.rank() / options.tp / options.cp),
        tokenizer_(tokenizer_for(options)),
        data_(batches_for(options, tokenizer_.get())),
        sharded_(make_sharded_model(options, mesh)),
        model_(sharded_.model),
        optimizer_(make_optimizer(options, model_)),  // over the shards
        learning_rate_(*optimizer_, learning_rate_options()),
        checkpointing_(options.checkpoints),
        times_([this] { return counted().wait_seconds; }),
        report_(mesh.rank(), options.steps, rows_per_step() * options.tokens),
        metrics_file_(options.metrics, mesh.rank(), rows_per_step() * options.tokens),
        peak_(unit_meshes_),
        page_(options, mesh, data_mesh_) {
    if (!options.compare) return;
    auto twin = make_model(options);
    auto twin_optimizer = make_optimizer(options, twin);
    twin_learning_rate_.emplace(*twin_optimizer, learning_rate_options());
    comparison_.emplace(std::move(twin), std::move(twin_optimizer),
                        rounding_of(options, data_mesh_.size()));
  }

  int run() {
    introduce();
    const int64_t done = resume();
    validate(done);
    std::vector<RankMetrics> metrics;
    std::optional<fsdp::Profile> profile;
    if (!options_.profile.empty() && !page_.is_wanted())
      profile.emplace(options_.profile, fsdp::ProfileOptions{.first_step = 2, .last_step = 4});
    page_.start(done);
    for (int64_t step = done + 1; step <= options_.steps; ++step) {
      metrics = train_step(step);
      page_.step(step, metrics);
      if (profile) profile->step();
      checkpointing_.save_if_due(step, options_.steps, state());
      std::optional<double> unsharded;
      if (comparison_) unsharded = comparison_->unsharded_loss();
      report_.step(step, metrics, unsharded, checkpointing_.status());
      const bool last = step == options_.steps;
      if (last || (options_.validate_every > 0 && step % options_.validate_every == 0))
        validate(step);
    }
    checkpointing_.finish();
    generate();
    export_model();
    page_.write(*model_);
    report_.time_table(times_);
    if (!metrics.empty()) report_.memory_table(metrics, sharded_.unsharded_bytes);
    return comparison_ ? conclude_comparison() : 0;
  }

 private:
  fsdp::State state() {
    return {.model = model_, .optimizer = optimizer_, .scheduler = learning_rate_};
  }

  LearningRateOptions learning_rate_options() const {
    return {.warmup = options_.warmup, .decay = options_.decay, .steps = options_.steps};
  }

  // That have batches of their own.
  int64_t data_ranks() const { return data_mesh_.size() / options_.cp; }

  int64_t rows_per_step() const { return options_.batch * options_.accumulate * data_ranks(); }

  // The steps that were done before.
  int64_t resume() {
    const int64_t done = checkpointing_.resume(state());
    if (done > 0) report_.say(formatted("resumed after step %lld", static_cast<long long>(done)));
    if (done >= options_.steps)
      report_.say(formatted("nothing is left to do: --steps is %lld",
                            static_cast<long long>(options_.steps)));
    report_.start_after(done);
    return done;
  }

  void introduce() {
    report_.say(formatted(
        "%.2f M parameters on %lld rank(s), %.1f M tokens to train on, %.1f M held out (%s)",
        sharded_.unsharded_bytes / 4e6, static_cast<long long>(mesh_.size()),
        data_.training_tokens() / 1e6, data_.held_out_tokens() / 1e6, options_.data.c_str()));
  }

  // Of one backward of one rank: those of all ranks come one behind the other.
  BatchRows rows_of(int64_t backward, int64_t rank) const {
    return {.first = (backward * data_ranks() + rank) * options_.batch,
            .count = options_.batch,
            .global = rows_per_step()};
  }

  // What this rank trains on in a step: a batch for each backward.
  std::vector<Batch> batches_of(int64_t step) const {
    std::vector<Batch> batches;
    for (int64_t backward = 0; backward < options_.accumulate; ++backward)
      batches.push_back(data_.training(step, rows_of(backward, data_rank_)));
    return batches;
  }

  // On this rank's device, and cut along the tokens over the ranks that share it: in
  // several blocks each, since the first tokens of a text attend to few and the last to
  // all.
  Batch placed(const Batch& batch) const {
    Batch moved = batch.to(options_.device);
    if (options_.cp == 1) return moved;
    const fsdp::Shard cut{.dim = 1, .outer = std::gcd(options_.tokens, kBlocksOfTokens)};
    for (torch::Tensor* const tokens : {&moved.inputs, &moved.targets})
      *tokens = fsdp::distribute_tensor(*tokens, mesh_["cp"], {cut});
    return moved;
  }

  // The mean loss of this rank's rows. Gradients are reduced by the last backward.
  double forward_backward(int64_t step) {
    double sum = 0;
    const auto batches = times_.measure(Phase::kData, [&] { return batches_of(step); });
    const auto count_targets = [&] { return mean_target_count(batches, data_mesh_); };
    const double target_count = options_.packing == Packing::kSeparate
                                    ? times_.measure(Phase::kMetrics, count_targets)
                                    : count_targets();
    auto units = fsdp::get_fsdp_module(*model_);
    for (int64_t backward = 0; backward < options_.accumulate; ++backward) {
      units.set_requires_gradient_sync(backward + 1 == options_.accumulate);
      const auto batch = times_.measure(
          Phase::kData, [&] { return placed(batches[static_cast<size_t>(backward)]); });
      auto loss =
          times_.measure(Phase::kForward, [&] { return batch_loss(model_, batch, target_count); });
      page_.see_unsharded();
      times_.measure(Phase::kBackward, [&] { (loss / options_.accumulate).backward(); });
      sum += loss.item<double>();
    }
    return sum / static_cast<double>(options_.accumulate);
  }

  // Scales the gradients. Gives their norm, if somebody wants to know it.
  std::optional<double> clip() {
    if (options_.clip == 0 && !metrics_file_.is_wanted()) return std::nullopt;
    const double most = options_.clip > 0 ? options_.clip : std::numeric_limits<double>::infinity();
    return fsdp::clip_grad_norm_(model_->parameters(), most).item<double>();
  }

  std::vector<RankMetrics> train_step(int64_t step) {
    const TrainingRange range("step", std::to_string(step));
    peak_.begin();
    learning_rate_.step();
    const double loss = forward_backward(step);
    if (comparison_) times_.measure(Phase::kUnsharded, [&] { compare_backward(step); });
    std::optional<double> norm;
    times_.measure(Phase::kOptimizer, [&] {
      norm = clip();
      optimizer_->step();
      optimizer_->zero_grad();
    });
    auto metrics =
        times_.measure(Phase::kMetrics, [&] { return exchange(own_metrics(loss), mesh_); });
    metrics_file_.step(step, metrics, learning_rate_.now(), norm);
    check_is_finite(step, mean_loss(metrics));
    if (comparison_) comparison_->record_sharded_loss(mean_loss(metrics));
    return metrics;
  }

  // Before a checkpoint of it replaces an older one. The same on every rank.
  static void check_is_finite(int64_t step, double loss) {
    TORCH_CHECK(std::isfinite(loss), "step ", step, ": the loss is ", loss,
                "; a lower --lr, a --warmup or --clip may keep it finite");
  }

  // Of all units.
  fsdp::Counters counted() const {
    fsdp::Counters sum;
    for (const auto& mesh : unit_meshes_) {
      const auto counters = fsdp::counters(mesh);
      sum.sharded_bytes += counters.sharded_bytes;
      sum.wait_seconds += counters.wait_seconds;
    }
    return sum;
  }

  RankMetrics own_metrics(double loss) const {
    const auto training = times_.training();
    const auto counters = counted();
    return {.loss = loss,
            .training_seconds = training.seconds,
            .waiting_seconds = training.waiting,
            .computing_seconds = times_.computing(),
            .shard_bytes = static_cast<double>(counters.sharded_bytes),
            .sharding_peak_bytes = static_cast<double>(peak_.highest()),
            .step_peak_bytes = static_cast<double>(peak_.of_step()),
            .resident_peak_bytes = resident_peak_bytes()};
  }

  void compare_backward(int64_t step) {
    std::vector<Batch> micro_batches;
    for (int64_t rank = 0; rank < data_ranks(); ++rank)
      micro_batches.push_back(data_.training(step, rows_of(0, rank)).to(options_.device));
    twin_learning_rate_->step();
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
      std::vector<Batch> batches;
      for (int64_t i = 0; i < kHeldOutBatches; ++i)
        for (int64_t backward = 0; backward < options_.accumulate; ++backward)
          batches.push_back(data_.held_out(i, rows_of(backward, data_rank_)));
      const double target_count = mean_target_count(batches, data_mesh_);
      for (const auto& batch : batches)
        sum += batch_loss(model_, placed(batch), target_count).item<double>();
      return exchange(own_metrics(sum / static_cast<double>(batches.size())), mesh_);
    });
    page_.validated(step, mean_loss(metrics));
    report_.say(formatted("validation loss after %lld steps: %.4f", static_cast<long long>(step),
                          mean_loss(metrics)));
  }

  // A collective: every rank generates, from the same random numbers, and rank 0 prints:
  // text, or tokens by their numbers, as they continue a held-out sequence.
  void generate() {
    if (options_.generate == 0) return;
    torch::manual_seed(options_.seed);
    const auto prompt = tokenizer_ ? tokenizer_->encode(options_.prompt).to(torch::kLong)
                                   : data_.held_out(0, {.first = 0, .count = 1, .global = 1})
                                         .inputs[0]
                                         .narrow(0, 0, std::min<int64_t>(options_.tokens, 16));
    const auto tokens = times_.measure(Phase::kGeneration, [&] {
      return fsdp::full_tensor(
          model_->generate(prompt.to(options_.device), options_.generate, options_.temperature));
    });
    report_.say("\ngenerated by the sharded model:\n" +
                (tokenizer_ ? printable(tokenizer_->decode(tokens)) : numbers_of(tokens)));
  }

  void export_model() {
    if (options_.export_to.empty()) return;
    const ExportOptions to{.folder = options_.export_to, .like = options_.init_from};
    options_.lora.rank > 0 ? export_adapters(model_, options_.model, options_.lora, to)
                           : export_hugging_face(model_, options_.model, to);
    report_.say("exported to " + options_.export_to);
  }

  int conclude_comparison() {
    const double largest = comparison_->largest_loss_difference();
    const bool agrees = first_step_agrees_ && largest <= kLossTolerance;
    report_.say(formatted(
        "\ncompared with the unsharded model over %lld steps: losses differ by at most %.3g "
        "relative "
        "(allowed: %.3g): %s",
        static_cast<long long>(options_.steps), largest, kLossTolerance,
        agrees ? "agree" : "DIFFER"));
    return agrees ? 0 : 1;
  }

  const TrainingOptions options_;
  const fsdp::DeviceMesh mesh_;                      // all ranks
  const fsdp::DeviceMesh data_mesh_;                 // those over which parameters are sharded
  const std::vector<fsdp::DeviceMesh> unit_meshes_;  // that one, and the experts'
  const int64_t data_rank_;
  const std::unique_ptr<Tokenizer> tokenizer_;  // null: the data are tokens
  const Batches data_;
  ShardedModel sharded_;
  Transformer& model_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  LearningRate learning_rate_;
  std::optional<Comparison> comparison_;
  std::optional<LearningRate> twin_learning_rate_;
  bool first_step_agrees_ = true;
  Checkpointing checkpointing_;
  PhaseTimes times_;
  Report report_;
  MetricsFile metrics_file_;
  StepPeak peak_;
  RunPage page_;
};

}  // namespace

void check_output_files(const TrainingOptions& options) {
  const OutputFile read[] = {{"--data", options.data}, {"--init_from", options.init_from}};
  for (const OutputFile& written :
       {OutputFile{"--metrics", options.metrics}, OutputFile{"--profile", options.profile},
        OutputFile{"--report", options.report}}) {
    for (const auto& each : read) check_is_not_read(written, each);
    check_output_file(written.flag, written.path);
  }
  check_files_differ(
      {{"--checkpoint", options.checkpoints.folder}, {"--export", options.export_to}});
  check_new_folder("--export", options.export_to);
  check_checkpoints(options.checkpoints);
}

int train(const TrainingOptions& options) {
  const auto place = fsdp::launch_environment();
  if (place.rank == 0) check_output_files(options);
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

}  // namespace programs
