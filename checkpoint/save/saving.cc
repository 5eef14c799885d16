#include "checkpoint/save/saving.h"

#include "checkpoint/files/checksums.h"
#include "checkpoint/files/errors.h"
#include "checkpoint/files/file_calls.h"
#include "checkpoint/format/ivalue_json.h"
#include "checkpoint/optimizer/optimizer_item.h"
#include "checkpoint/plan/names_in_file.h"
#include "checkpoint/plan/save_plan.h"
#include "checkpoint/plan/state_items.h"
#include "checkpoint/plan/whole_values.h"
#include "checkpoint/ranks/tensor_values.h"
#include "checkpoint/save/unit_writes.h"
#include "fully_shard/units/unit.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/graph_task.h>

#include <iterator>
#include <map>
#include <utility>

namespace fsdp::internal::checkpoint {
namespace {

// What each rank says first: hashes of path, options, plan and writes to shards; the id.
constexpr size_t kHash = 16;

// Buffers that are cast for computing (MixedPrecisionPolicy::buffer_dtype), as they were.
std::vector<NamedTensor> in_own_dtypes(std::vector<NamedTensor> tensors) {
  for (auto& each : tensors) each.tensor = in_own_dtype(each.tensor);
  return tensors;
}

std::vector<SaveItem> items_of(const State& state) {
  std::vector<SaveItem> items;
  std::map<std::string, ModelTensors> models;
  for (const auto& [item, module] : models_of(state)) {
    const ModelTensors& tensors = models[item] = tensors_of(*module);
    items.push_back({item, "model", in_own_dtypes(tensors.tensors), tensors.ties});
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

void check_options(const SaveOptions& options) {
  TORCH_CHECK_VALUE(options.max_file_bytes > 0, "SaveOptions::max_file_bytes is ",
                    options.max_file_bytes, "; it must be 1 or more");
  TORCH_CHECK_VALUE(options.keep_last >= 0, "SaveOptions::keep_last is ", options.keep_last,
                    "; it must be 0 (all) or more");
  TORCH_CHECK_VALUE(!options.model_dtype || c10::isFloatingType(*options.model_dtype),
                    "SaveOptions::model_dtype is ", *options.model_dtype,
                    "; it must be a floating-point type");
  TORCH_CHECK_VALUE(!options.model_dtype || options.layout == Layout::kFull,
                    "SaveOptions::model_dtype is of Layout::kFull only");
}

std::string fingerprint_of(const SaveOptions& options) {
  std::string text;
  for (const int64_t number :
       {static_cast<int64_t>(options.layout), int64_t{options.overwrite}, options.step,
        options.keep_last, options.max_file_bytes, int64_t{options.name_in_file != nullptr},
        options.model_dtype ? static_cast<int64_t>(*options.model_dtype) : int64_t{-1}}) {
    text += std::to_string(number) + ",";
  }
  return checksum_text(text);
}

// What is gathered, in the order of writing.
std::vector<NamedTensor> whole_tensors_of(const std::vector<FileToWrite>& files) {
  std::vector<NamedTensor> tensors;
  for (const FileToWrite& file : files) {
    if (file.kind != FileKind::kWhole) continue;
    for (const PartToWrite& part : file.parts) {
      tensors.push_back({part.entry.name, part.tensor, part.unit});
    }
  }
  return tensors;
}

bool differ(const std::vector<std::string>& texts, size_t index) {
  for (const auto& text : texts) {
    if (text.substr(index * kHash, kHash) != texts[0].substr(index * kHash, kHash)) return true;
  }
  return false;
}

}  // namespace

Saving::Saving(const std::string& path, SaveOptions options)
    : path_(normal_path(path)), what_("save " + path), options_(options), world_(default_world()) {}

// A world of one holds every tensor whole.
bool Saving::is_full() const { return options_.layout == Layout::kFull || world_.size == 1; }

void Saving::begin(const State& state, const std::function<void()>& before) {
  std::string said, writes;
  if (world_.rank == 0) id_ = new_save_id();
  const Failure failure = attempt([&] {
    before();
    check_options(options_);
    TORCH_CHECK(torch::autograd::get_current_graph_task_id() == -1, "inside a backward");
    plan(state);
    if (world_.rank == 0) begin_commit(state);
    const UnitWrites of_units(items_);
    writes = of_units.text();
    said = checksum_text(path_) + fingerprint_of(options_) +
           checksum_text(format_manifest(plan_.manifest)) + of_units.fingerprint() + id_;
  });
  agree_on_plan(agree(world_, failure, said, what_), writes);
  items_.clear();
}

void Saving::plan(const State& state) {
  items_ = items_of(state);
  check_savable(items_);
  rename_in_file(items_, options_.name_in_file, "SaveOptions::name_in_file");
  plan_ = is_full() ? plan_full(items_, world_.size, options_)
                    : plan_save(items_, world_.rank, world_.size, /*balanced=*/true);
  per_rank_ = state.per_rank;
  if (state.rng) per_rank_.merge(generator_states(world_));
  for (const auto& [name, value] : per_rank_) {
    check_name(name);
    plan_.manifest.per_rank.push_back(name);
  }
}

void Saving::begin_commit(const State& state) {
  for (const auto& [name, value] : state.values) {
    check_name(name);
    values_[name] = to_json(value, name);
    text_of(values_[name], name);
  }
  if (const auto* scheduler = state.scheduler.get()) scheduler_ = step_count(*scheduler);
  std::vector<std::string> folders;
  for (const SaveItem& item : items_) folders.push_back(item.name);
  if (!per_rank_.empty()) folders.push_back("ranks");
  commit_.emplace(value_or_raise(Commit::begin(path_, id_, folders, options_.overwrite)));
}

void Saving::agree_on_plan(const std::vector<std::string>& texts, const std::string& writes) {
  const char* const things[] = {"path", "options"};
  for (size_t rank = 1; rank < texts.size(); ++rank) {
    for (size_t i = 0; i < std::size(things); ++i) {
      TORCH_CHECK_VALUE(!differ({texts[0], texts[rank]}, i), what_, ": rank ", rank,
                        " gives another ", things[i], " than rank 0");
    }
  }
  id_ = texts[0].substr(4 * kHash, kHash);
  if (differ(texts, 3)) UnitWrites::check(exchange(world_, writes, what_), what_);
  if (differ(texts, 2)) merge();
  plan_.manifest.save_id = id_;
}

// The ranks' models differ.
void Saving::merge() {
  TORCH_CHECK_VALUE(!is_full(), what_,
                    ": the ranks' models differ; Layout::kFull is for models that every rank has");
  const auto per_rank = std::move(plan_.manifest.per_rank);
  plan_ = plan_save(items_, world_.rank, world_.size, /*balanced=*/false);
  plan_.manifest.per_rank = per_rank;
  const auto texts = exchange(world_, format_manifest(plan_.manifest), what_);
  std::vector<Manifest> plans;
  for (const auto& text : texts) plans.push_back(value_or_raise(parse_manifest(text, what_)));
  std::vector<Json> hashes;
  if (const auto names = names_on_slices(plans); !names.empty()) {
    const auto own = hashes_on_slices(items_, names);
    for (const auto& text : exchange(world_, own.dump(), what_))
      hashes.push_back(Json::parse(text));
  }
  plan_.manifest = merge_plans(plans, hashes);
  plan_.files = files_of_rank(items_, plan_.manifest, world_.rank);
}

void Saving::take(StagingBuffer& staging, int64_t staged_bytes) {
  failure_ = attempt([&] {
    std::vector<FileToWrite> files = std::move(plan_.files);
    if (!per_rank_.empty()) files.push_back(per_rank_file(world_.rank, per_rank_));
    writing_.emplace(staging_path(path_, id_), world_.rank);
    WholeValues whole(whole_tensors_of(files), world_);
    const auto value_of = [&](FileKind kind, const at::Tensor& tensor) {
      return kind == FileKind::kWhole ? whole.next() : local_value(tensor);
    };
    writing_->take(std::move(files), value_of, staging, staged_bytes);
  });
  per_rank_.clear();
}

void Saving::finish(const World& world) {
  write_rest(world);
  commit(world);
}

void Saving::write_rest(const World& world) {
  Json written = Json::object();
  const Failure failure = !failure_.text.empty() ? failure_ : attempt([&] {
    for (const auto& [path, file] : value_or_raise(writing_->finish())) {
      written[path] = {file.bytes, file.checksum};
    }
    if (world.rank != 0) return;
    for (const auto& [path, text] : plan_.texts) {
      raise_unless_ok(write_file(staging_path(path_, id_) + "/" + path, text));
      written[path] = {text.size(), checksum_text(text)};
    }
  });
  const auto texts = agree(world, failure, written.dump(), what_);
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    const Json files = Json::parse(texts[rank]);
    for (const auto& [name, file] : files.items()) {
      plan_.manifest.files[name] = {static_cast<int64_t>(rank), file.at(0).get<int64_t>(),
                                    file.at(1).get<std::string>()};
    }
  }
}

void Saving::commit(const World& world) {
  const Failure failure = attempt([&] {
    if (!commit_) return;
    Manifest& manifest = plan_.manifest;
    manifest.step = options_.step;
    manifest.saved_at = now_ns();
    manifest.values = std::move(values_);
    manifest.scheduler = std::move(scheduler_);
    raise_unless_ok(commit_->finish(format_manifest(manifest)));
  });
  agree(world, failure, "", what_);
  if (commit_) commit_->tidy(options_.keep_last);
}

}  // namespace fsdp::internal::checkpoint
