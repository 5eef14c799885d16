#include "checkpoint/checkpoint.h"
#include "checkpoint/files/errors.h"
#include "checkpoint/format/catalog/catalog.h"
#include "checkpoint/format/catalog/foreign_files.h"
#include "checkpoint/format/ivalue_json.h"
#include "checkpoint/io/commit.h"
#include "checkpoint/io/misfits.h"
#include "checkpoint/io/tensor_reader.h"
#include "checkpoint/optimizer/libtorch_optimizer.h"
#include "checkpoint/optimizer/optimizer_item.h"
#include "checkpoint/plan/state_items.h"
#include "checkpoint/ranks/world.h"
#include "checkpoint/save/per_rank.h"
#include "device_mesh/internal/name_pattern.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <deque>
#include <filesystem>
#include <optional>
#include <set>
#include <system_error>
#include <utility>

namespace fsdp {
namespace {

using namespace internal::checkpoint;  // NOLINT: this file is its front

std::optional<std::string> find(const Catalog& catalog, const std::string& name) {
  if (catalog.tensors.count(name) != 0) return name;
  const auto tie = catalog.ties.find(name);
  if (tie != catalog.ties.end() && catalog.tensors.count(tie->second) != 0) return tie->second;
  return std::nullopt;
}

void append(std::vector<std::string>& to, const std::vector<std::string>& from) {
  to.insert(to.end(), from.begin(), from.end());
}

// The tensors that a load leaves as they are (LoadOptions::leave).
class LeftAlone {
 public:
  explicit LeftAlone(const std::vector<std::string>& patterns)
      : patterns_(patterns), unused_(patterns.begin(), patterns.end()) {}

  // Whether a pattern means one of a tensor's names.
  bool has(const std::vector<std::string>& names) {
    bool found = false;
    for (const auto& pattern : patterns_) {
      const auto means = [&](const auto& name) {
        return internal::match_name(pattern, name).has_value();
      };
      if (std::none_of(names.begin(), names.end(), means)) continue;
      unused_.erase(pattern);
      found = true;
    }
    return found;
  }

  // Throws ValueError for a pattern that has meant no name so far.
  void check_all_used() const {
    TORCH_CHECK_VALUE(unused_.empty(), "LoadOptions::leave: '", *unused_.begin(),
                      "' means no name of a model or of State::tensors");
  }

 private:
  std::vector<std::string> patterns_;
  std::set<std::string> unused_;
};

// One call of load() on one rank: everything is checked, then everything is written.
class Loading {
 public:
  Loading(const State& state, const std::string& path, LoadOptions options)
      : state_(state),
        path_(readable_path(normal_path(path))),
        what_("load " + path),
        options_(std::move(options)),
        world_(default_world()),
        left_alone_(options_.leave) {}

  LoadResult run() {
    const Failure failure = without_path(attempt([&] { plan(); }));
    const std::string names = fingerprint_of(unmatched_);
    const auto texts = agree(world_, failure, names + (manifest_ ? manifest_->save_id : ""), what_);
    bool same_names = true;
    for (size_t rank = 1; rank < texts.size(); ++rank) {
      TORCH_CHECK_VALUE(texts[rank].substr(names.size()) == texts[0].substr(names.size()), what_,
                        ": rank ", rank, " reads another checkpoint than rank 0");
      same_names &= texts[rank] == texts[0];
    }
    check_names(same_names);
    tell_unread();
    agree(world_, attempt([&] { apply(); }), "",
          what_ + ": the model and the optimizers are now partly overwritten");
    return std::move(result_);
  }

 private:
  void plan() {
    TORCH_CHECK_VALUE(!path_.empty(), "the path is empty");
    read_manifest_if_any();
    std::map<std::string, ModelTensors> models;
    for (const auto& [item, module] : models_of(state_)) {
      plan_model(item, models[item] = tensors_of(*module));
    }
    if (manifest_) {
      for (const auto& [item, each] : optimizers_of(state_)) {
        plan_optimizer(item, *each.optimizer, models.at(each.model));
      }
    } else if (state_.optimizer.get() != nullptr || !state_.optimizers.empty()) {
      plan_foreign_optimizer();
    }
    if (!state_.tensors.empty()) {
      ModelTensors loose;
      for (const auto& [name, tensor] : state_.tensors) loose.tensors.push_back({name, tensor});
      plan_model("tensors", loose);
    }
    // Nothing was asked of a file that others made, which may be none at all.
    if (!manifest_ && catalogs_.empty() && !foreign_) open_catalog("");
    misfits_.raise_any();
    left_alone_.check_all_used();
    plan_rest();
    // Into memory of its own, which is nobody's yet.
    for (TensorReader& reader : state_readers_) raise_unless_ok(reader.read());
  }

  // The error begins with it already.
  Failure without_path(Failure failure) const {
    if (failure.text.starts_with(path_ + ": ")) failure.text.erase(0, path_.size() + 2);
    return failure;
  }

  void read_manifest_if_any() {
    auto manifest = read_manifest(path_);
    if (manifest.ok()) {
      manifest_ = *std::move(manifest);
    } else if (!absl::IsNotFound(manifest.status()) && std::filesystem::is_directory(path_)) {
      raise_unless_ok(manifest.status());
    } else {
      std::error_code error;
      TORCH_CHECK(std::filesystem::exists(path_, error), "no such checkpoint");
    }
  }

  Catalog& open_catalog(const std::string& item) {
    return catalogs_.emplace_back(value_or_raise(
        manifest_ ? catalog_of_item(path_, *manifest_, item) : catalog_of_files(path_)));
  }

  ReadRules rules() const { return {options_.verify, options_.cast, options_.init_new_rows}; }

  std::string name_in_file(const std::string& name) const {
    return options_.name_in_file ? options_.name_in_file(name) : name;
  }

  void plan_model(const std::string& item, const ModelTensors& model) {
    const Catalog& catalog = open_catalog(item);
    TensorReader& reader = readers_.emplace_back(catalog, rules());
    std::map<std::string, std::vector<std::string>> other_names;
    for (const auto& [other, first] : model.ties) other_names[first].push_back(other);
    std::set<std::string> used;
    for (const NamedTensor& named : model.tensors) {
      check_has_values(named);
      std::vector<std::string> names = other_names[named.name];
      names.insert(names.begin(), named.name);
      const auto stored = find_all(catalog, names);
      used.insert(stored.begin(), stored.end());
      if (left_alone_.has(names)) continue;
      if (stored.empty()) {
        unmatched_.missing.push_back(named.name);
        for (const auto& each : names) note_unread(catalog, name_in_file(each));
        continue;
      }
      const auto fits = reader.plan(stored.front(), named.name, named.tensor);
      misfits_.note(fits);
      if (fits.ok()) check_tied_in_file(catalog, stored, named.name, named.tensor, rules());
    }
    for (const auto& [name, tensor] : catalog.tensors) {
      if (used.count(name) == 0) unmatched_.unexpected.push_back(name);
    }
    for (const auto& [name, each] : catalog.unread) {
      result_.skipped.push_back(name);
      const bool is_asked = asked_.count(name) != 0;
      if (each.is_tensor && !is_asked) unmatched_.unexpected.push_back(name);
      if (each.is_tensor || is_asked) unread_.push_back("'" + name + "' is " + each.what);
    }
  }

  // That the file has a name, and not as what can be read.
  void note_unread(const Catalog& catalog, const std::string& name) {
    if (catalog.unread.count(name) != 0) asked_.insert(name);
  }

  // What the file has under these names, each once.
  std::vector<std::string> find_all(const Catalog& catalog,
                                    const std::vector<std::string>& names) const {
    std::vector<std::string> all;
    std::set<std::string> known;
    for (const auto& name : names) {
      const auto found = find(catalog, name_in_file(name));
      if (found && known.insert(*found).second) all.push_back(*found);
    }
    return all;
  }

  void plan_optimizer(const std::string& item, torch::optim::Optimizer& optimizer,
                      const ModelTensors& model) {
    const Catalog& catalog = open_catalog(item);
    plan_fields(optimizers_.emplace_back(optimizer, model, catalog,
                                         manifest_->items.at(item).details, options_),
                catalog);
  }

  // A file of torch::save(optimizer), whose parameters are known by their places alone.
  void plan_foreign_optimizer() {
    TORCH_CHECK_VALUE(state_.optimizers.empty(), "State::optimizers load from a checkpoint of ",
                      "save() alone; a file of torch::save holds one, for State::optimizer");
    torch::optim::Optimizer& optimizer = *state_.optimizer.get();
    foreign_ = value_or_raise(read_libtorch_optimizer(path_, optimizer));
    plan_fields(optimizers_.emplace_back(optimizer, foreign_->parameters, foreign_->catalog,
                                         foreign_->details, LoadOptions{}),
                foreign_->catalog);
  }

  void plan_fields(const OptimizerLoad& load, const Catalog& catalog) {
    TensorReader& reader =
        state_readers_.emplace_back(catalog, ReadRules{options_.verify, options_.cast});
    for (const auto& wanted : load.wanted()) {
      misfits_.note(reader.plan(wanted.stored_name, wanted.name, wanted.target));
    }
    append(unmatched_.missing, load.missing());
    append(unmatched_.unexpected, load.unexpected());
  }

  // Collective unless all ranks have the same names.
  void check_names(bool same_names) {
    const UnmatchedNames all =
        same_names ? unmatched_ : unmatched_by_all(unmatched_, world_, what_);
    result_.missing = std::move(unmatched_.missing);
    result_.unexpected = all.unexpected;
    if (!options_.strict) return;
    std::string advice = "LoadOptions::strict = false loads the others";
    if (!unread_.empty()) advice = "not read: " + list_of(unread_) + "; " + advice;
    const Failure failure =
        attempt([&] { check_no_names(all.missing, "the file", all.unexpected, advice); });
    TORCH_CHECK_VALUE(failure.text.empty(), what_, ": ", failure.text);  // on all ranks alike
  }

  void tell_unread() const {
    if (unread_.empty() || world_.rank != 0) return;
    TORCH_WARN(what_, ": left alone, since it is not read: ", list_of(unread_));
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

  void apply() {
    for (OptimizerLoad& optimizer : optimizers_) optimizer.apply();
    for (TensorReader& reader : readers_) raise_unless_ok(reader.read());
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
  LeftAlone left_alone_;
  std::optional<Manifest> manifest_;
  std::deque<Catalog> catalogs_;                      // deques: readers keep references
  std::deque<TensorReader> readers_, state_readers_;  // of models, of optimizers
  std::deque<OptimizerLoad> optimizers_;
  UnmatchedNames unmatched_;
  std::optional<LibTorchOptimizer> foreign_;
  Misfits misfits_;
  std::set<std::string> asked_;      // names wanted that the file has as something unread
  std::vector<std::string> unread_;  // tensors of the file or wanted, and what they are
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
