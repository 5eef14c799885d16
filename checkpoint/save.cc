#include "checkpoint/checkpoint.h"
#include "checkpoint/internal/checksums.h"
#include "checkpoint/internal/commit.h"
#include "checkpoint/internal/ivalue_json.h"
#include "checkpoint/internal/optimizer_item.h"
#include "checkpoint/internal/per_rank.h"
#include "checkpoint/internal/raise.h"
#include "checkpoint/internal/save_plan.h"
#include "checkpoint/internal/scheduler_step.h"
#include "checkpoint/internal/world.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <optional>
#include <random>
#include <utility>

namespace fsdp {
namespace {

using namespace internal::checkpoint;  // NOLINT: this file is its front

std::vector<SaveItem> items_of(const State& state) {
  std::vector<SaveItem> items;
  std::map<std::string, ModelTensors> models;
  for (const auto& [item, module] : models_of(state)) {
    ModelTensors& tensors = models[item] = tensors_of(*module);
    items.push_back({item, "model", tensors.tensors, tensors.ties});
  }
  for (const auto& [item, each] : optimizers_of(state)) {
    OptimizerTensors tensors = tensors_of(*each.optimizer, models.at(each.model), "save");
    items.push_back(
        {item, "optimizer", std::move(tensors.tensors), {}, std::move(tensors.details)});
  }
  if (state.tensors.empty()) return items;
  SaveItem loose{.name = "tensors", .kind = "tensors"};
  for (const auto& [name, tensor] : state.tensors) loose.tensors.push_back({name, tensor});
  items.push_back(std::move(loose));
  return items;
}

std::string new_id() {
  std::random_device random;
  const uint64_t number = (uint64_t{random()} << 32) ^ random();
  return checksum_text({reinterpret_cast<const char*>(&number), sizeof(number)});
}

int64_t now_ns() {
  using std::chrono::nanoseconds;
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<nanoseconds>(now).count();
}

std::string fingerprint_of(const SaveOptions& options) {
  std::string text;
  for (const int64_t number :
       {static_cast<int64_t>(options.layout), int64_t{options.overwrite}, options.step,
        options.keep_last, options.max_file_bytes,
        options.model_dtype ? static_cast<int64_t>(*options.model_dtype) : int64_t{-1}}) {
    text += std::to_string(number) + ",";
  }
  return checksum_text(text);
}

// One call of save() on one rank.
class Saving {
 public:
  Saving(const State& state, const std::string& path, SaveOptions options)
      : state_(state),
        path_(normal_path(path)),
        what_("save " + path),
        options_(options),
        world_(default_world()) {}

  void run() {
    begin();
    write();
    commit();
  }

 private:
  void begin() {
    std::string id = world_.rank == 0 ? new_id() : std::string(16, '0');
    std::string said;
    const Failure failure = attempt([&] {
      check_options();
      items_ = items_of(state_);
      plan_ = plan_save(items_, world_.rank, world_.size, /*balanced=*/true);
      collect_per_rank();
      if (world_.rank == 0) begin_commit(id);
      said = checksum_text(path_) + fingerprint_of(options_) + plan_hash() + id;
    });
    const auto texts = agree(world_, failure, said, what_);
    plan_.manifest.save_id = texts[0].substr(48, 16);
    check_same(texts, 0, "path");
    check_same(texts, 16, "options");
    if (differ(texts, 32)) merge();
  }

  void check_options() const {
    TORCH_CHECK_VALUE(options_.layout == Layout::kSharded || options_.max_file_bytes > 0,
                      "SaveOptions::max_file_bytes is ", options_.max_file_bytes);
    TORCH_CHECK_VALUE(options_.keep_last >= 0, "SaveOptions::keep_last is ", options_.keep_last);
    TORCH_CHECK_NOT_IMPLEMENTED(options_.layout == Layout::kSharded, "Layout::kFull");
  }

  void collect_per_rank() {
    per_rank_ = state_.per_rank;
    if (state_.rng) per_rank_.merge(generator_states(world_));
    for (const auto& [name, value] : per_rank_) plan_.manifest.per_rank.push_back(name);
  }

  void begin_commit(const std::string& id) {
    for (const auto& [name, value] : state_.values) {
      plan_.manifest.values[name] = to_json(value, name);
    }
    values_ = std::exchange(plan_.manifest.values, Json::object());
    std::vector<std::string> folders;
    for (const SaveItem& item : items_) folders.push_back(item.name);
    if (!per_rank_.empty()) folders.push_back("ranks");
    commit_.emplace(value_or_raise(Commit::begin(path_, id, folders, options_.overwrite)));
  }

  std::string plan_hash() const { return checksum_text(format_manifest(plan_.manifest)); }

  static bool differ(const std::vector<std::string>& texts, size_t at) {
    for (const auto& text : texts) {
      if (text.substr(at, 16) != texts[0].substr(at, 16)) return true;
    }
    return false;
  }

  void check_same(const std::vector<std::string>& texts, size_t at, const char* thing) const {
    for (size_t rank = 1; rank < texts.size(); ++rank) {
      TORCH_CHECK_VALUE(texts[rank].substr(at, 16) == texts[0].substr(at, 16), what_, ": rank ",
                        rank, " gives another ", thing, " than rank 0");
    }
  }

  // The ranks' models differ.
  void merge() {
    const std::string id = plan_.manifest.save_id;
    plan_ = plan_save(items_, world_.rank, world_.size, /*balanced=*/false);
    for (const auto& [name, value] : per_rank_) plan_.manifest.per_rank.push_back(name);
    const auto texts = exchange(world_, format_manifest(plan_.manifest), what_);
    std::vector<Manifest> plans;
    for (const auto& text : texts) plans.push_back(value_or_raise(parse_manifest(text, what_)));
    plan_.manifest = merge_plans(plans);
    plan_.manifest.save_id = id;
  }

  void write() {
    Json written = Json::object();
    const Failure failure = attempt([&] {
      for (const auto& [item, parts] : plan_.mine) {
        note(written, shard_path(item, world_.rank), [&](const std::string& file) {
          return write_shard_file(file, parts, ties_of(item), /*sharded=*/true);
        });
      }
      if (!per_rank_.empty()) {
        note(written, rank_path(world_.rank),
             [&](const std::string& file) { return write_per_rank(file, per_rank_); });
      }
    });
    const auto texts = agree(world_, failure, written.dump(), what_);
    for (size_t rank = 0; rank < texts.size(); ++rank) {
      const Json files = Json::parse(texts[rank]);
      for (const auto& [name, file] : files.items()) {
        plan_.manifest.files[name] = {static_cast<int64_t>(rank), file.at(0).get<int64_t>(),
                                      file.at(1).get<std::string>()};
      }
    }
  }

  template <class Write>
  void note(Json& written, const std::string& name, Write write_file) {
    const std::string folder = staging_path(path_, plan_.manifest.save_id);
    const WrittenFile file = value_or_raise(write_file(folder + "/" + name));
    written[name] = {file.bytes, file.checksum};
  }

  std::map<std::string, std::string> ties_of(const std::string& item) const {
    return plan_.manifest.items.at(item).ties;
  }

  void commit() {
    const Failure failure = attempt([&] {
      if (!commit_) return;
      Manifest& manifest = plan_.manifest;
      manifest.step = options_.step;
      manifest.saved_at = now_ns();
      manifest.values = std::move(values_);
      if (auto* scheduler = state_.scheduler.get()) manifest.scheduler = step_count(*scheduler);
      raise_unless_ok(commit_->finish(format_manifest(manifest)));
    });
    agree(world_, failure, "", what_);
    if (commit_) commit_->tidy(options_.keep_last);
  }

  const State& state_;
  const std::string path_, what_;
  const SaveOptions options_;
  const World world_;
  std::vector<SaveItem> items_;
  PerRank per_rank_;
  SavePlan plan_;
  Json values_;
  std::optional<Commit> commit_;  // rank 0's
};

}  // namespace

void save(const State& state, const std::string& path, SaveOptions options) {
  Saving(state, path, options).run();
}

}  // namespace fsdp
