#include "checkpoint/checkpoint.h"
#include "checkpoint/internal/catalog.h"
#include "checkpoint/internal/commit.h"
#include "checkpoint/internal/ivalue_json.h"
#include "checkpoint/internal/names.h"
#include "checkpoint/internal/optimizer_item.h"
#include "checkpoint/internal/per_rank.h"
#include "checkpoint/internal/raise.h"
#include "checkpoint/internal/scheduler_step.h"
#include "checkpoint/internal/tensor_reader.h"
#include "checkpoint/internal/world.h"

#include <c10/util/Exception.h>

#include <deque>
#include <filesystem>
#include <optional>
#include <set>
#include <system_error>
#include <utility>

namespace fsdp {
namespace {

using namespace internal::checkpoint;  // NOLINT: this file is its front

// One call of load() on one rank: everything is checked, then everything is written.
class Loading {
 public:
  Loading(const State& state, const std::string& path, LoadOptions options)
      : state_(state),
        path_(readable_path(normal_path(path))),
        what_("load " + path),
        options_(std::move(options)),
        world_(default_world()) {}

  LoadResult run() {
    const Failure failure = attempt([&] { plan(); });
    const auto ids = agree(world_, failure, manifest_ ? manifest_->save_id : "", what_);
    for (size_t rank = 1; rank < ids.size(); ++rank) {
      TORCH_CHECK_VALUE(ids[rank] == ids[0], what_, ": rank ", rank,
                        " reads another checkpoint than rank 0");
    }
    agree(world_, attempt([&] { read(); }), "", what_ + ", which is now partly overwritten");
    apply();
    return std::move(result_);
  }

 private:
  void plan() {
    read_manifest_if_any();
    std::map<std::string, ModelTensors> models;
    for (const auto& [item, module] : models_of(state_)) {
      plan_model(item, models[item] = tensors_of(*module));
    }
    for (const auto& [item, each] : optimizers_of(state_)) {
      plan_optimizer(item, *each.optimizer, models.at(each.model));
    }
    if (!state_.tensors.empty()) {
      ModelTensors loose;
      for (const auto& [name, tensor] : state_.tensors) loose.tensors.push_back({name, tensor});
      plan_model("tensors", loose);
    }
    check_names();
    plan_rest();
  }

  void read_manifest_if_any() {
    auto manifest = read_manifest(path_);
    if (manifest.ok()) {
      manifest_ = *std::move(manifest);
    } else if (!absl::IsNotFound(manifest.status()) && std::filesystem::is_directory(path_)) {
      raise_unless_ok(manifest.status());
    } else {
      std::error_code error;
      TORCH_CHECK(std::filesystem::exists(path_, error), path_, ": no such checkpoint");
    }
  }

  Catalog& open_catalog(const std::string& item) {
    return catalogs_.emplace_back(value_or_raise(
        manifest_ ? catalog_of_item(path_, *manifest_, item) : catalog_of_files(path_)));
  }

  TensorReader& new_reader(const Catalog& catalog) {
    return readers_.emplace_back(catalog, ReadRules{options_.verify, options_.cast});
  }

  std::string name_in_file(const std::string& name) const {
    return options_.name_in_file ? options_.name_in_file(name) : name;
  }

  void plan_model(const std::string& item, const ModelTensors& model) {
    const Catalog& catalog = open_catalog(item);
    TensorReader& reader = new_reader(catalog);
    std::map<std::string, std::vector<std::string>> other_names;
    for (const auto& [other, first] : model.ties) other_names[first].push_back(other);
    std::set<std::string> used;
    for (const auto& [name, tensor, unit] : model.tensors) {
      std::vector<std::string> names = other_names[name];
      names.insert(names.begin(), name);
      std::optional<std::string> stored;
      for (const auto& each : names) {
        const auto found = find(catalog, name_in_file(each));
        if (!found) continue;
        used.insert(*found);
        if (!stored) stored = found;
      }
      if (stored) {
        raise_unless_ok(reader.plan(*stored, name, tensor));
      } else {
        result_.missing.push_back(name);
      }
    }
    for (const auto& [name, tensor] : catalog.tensors) {
      if (used.count(name) == 0) result_.unexpected.push_back(name);
    }
  }

  static std::optional<std::string> find(const Catalog& catalog, const std::string& name) {
    if (catalog.tensors.count(name) != 0) return name;
    const auto tie = catalog.ties.find(name);
    if (tie != catalog.ties.end() && catalog.tensors.count(tie->second) != 0) return tie->second;
    return std::nullopt;
  }

  void plan_optimizer(const std::string& item, torch::optim::Optimizer& optimizer,
                      const ModelTensors& model) {
    TORCH_CHECK_VALUE(manifest_, "'", item, "': only a checkpoint of save() holds its options");
    const Catalog& catalog = open_catalog(item);
    OptimizerLoad& load = optimizers_.emplace_back(optimizer, model, catalog,
                                                   manifest_->items.at(item).details, options_);
    TensorReader& reader = new_reader(catalog);
    for (const auto& wanted : load.wanted()) {
      raise_unless_ok(reader.plan(wanted.stored_name, wanted.name, wanted.target));
    }
    append(result_.missing, load.missing());
    append(result_.unexpected, load.unexpected());
  }

  static void append(std::vector<std::string>& to, const std::vector<std::string>& from) {
    to.insert(to.end(), from.begin(), from.end());
  }

  void check_names() const {
    if (!options_.strict) return;
    check_no_names(result_.missing, "the file", result_.unexpected,
                   "LoadOptions::strict = false loads the others");
  }

  void plan_rest() {
    if (!manifest_) return;
    result_.step = manifest_->step;
    for (const auto& [name, value] : manifest_->values.items()) {
      result_.values.emplace(name, from_json(value));
    }
    if (manifest_->per_rank.empty()) return;
    if (manifest_->world_size == world_.size) {
      result_.per_rank =
          value_or_raise(read_per_rank(path_, *manifest_, world_.rank, options_.verify));
      return;
    }
    TORCH_CHECK_VALUE(options_.skip_per_rank, "saved by ", manifest_->world_size,
                      " ranks, loading on ", world_.size, ": per-rank items ",
                      list_of(manifest_->per_rank),
                      "; LoadOptions::skip_per_rank leaves them alone");
    result_.skipped = manifest_->per_rank;
  }

  void read() {
    for (TensorReader& reader : readers_) raise_unless_ok(reader.read());
  }

  void apply() {
    for (OptimizerLoad& optimizer : optimizers_) optimizer.apply();
    if (auto* scheduler = state_.scheduler.get(); scheduler && manifest_) {
      if (manifest_->scheduler.is_number()) {
        set_step_count(*scheduler, manifest_->scheduler.get<unsigned>());
      }
    }
    if (state_.rng) restore_generators(result_.per_rank);
    forget_generators(result_.per_rank);
  }

  const State& state_;
  const std::string path_, what_;
  const LoadOptions options_;
  const World world_;
  std::optional<Manifest> manifest_;
  std::deque<Catalog> catalogs_;  // deques: readers keep references
  std::deque<TensorReader> readers_;
  std::deque<OptimizerLoad> optimizers_;
  LoadResult result_;
};

}  // namespace

LoadResult load(const State& state, const std::string& path, LoadOptions options) {
  return Loading(state, path, std::move(options)).run();
}

std::optional<std::string> latest_checkpoint(const std::string& directory) {
  const auto all = committed_checkpoints(normal_path(directory));
  if (all.empty()) return std::nullopt;
  return all.back().path;
}

}  // namespace fsdp
