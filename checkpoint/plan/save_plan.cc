#include "checkpoint/plan/save_plan.h"

#include "checkpoint/format/dtype.h"
#include "checkpoint/format/saved_layout.h"
#include "checkpoint/ranks/tensor_values.h"
#include "dtensor/dtensor.h"
#include "dtensor/tensor/value_hash.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <set>
#include <string>
#include <utility>

namespace fsdp::internal::checkpoint {
namespace {

// Smaller copies all go to the first rank: readers open its file anyway.
constexpr int64_t kSmallBytes = int64_t{64} * 1024;

size_t index_of(std::vector<SavedLayout>& layouts, const SavedLayout& layout) {
  const auto found = std::find(layouts.begin(), layouts.end(), layout);
  if (found != layouts.end()) return static_cast<size_t>(found - layouts.begin());
  layouts.push_back(layout);
  return layouts.size() - 1;
}

bool is_copied(const SavedLayout& layout) {
  return std::none_of(layout.placements.begin(), layout.placements.end(),
                      [](const Placement& placement) { return placement.is_shard(); });
}

class Planner {
 public:
  Planner(int64_t world_size, bool balanced) : world_size_(world_size), balanced_(balanced) {}

  void add(const SaveItem& item) {
    ItemRecord record{.kind = item.kind, .tensors = {}, .ties = item.ties, .details = item.details};
    std::vector<size_t> order(item.tensors.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      return item.tensors[a].tensor.nbytes() > item.tensors[b].tensor.nbytes();
    });
    for (const size_t i : order) record.tensors[item.tensors[i].name] = place(item.tensors[i]);
    manifest_.items.emplace(item.name, std::move(record));
  }

  Manifest take() {
    manifest_.world_size = world_size_;
    return std::move(manifest_);
  }

 private:
  TensorRecord place(const NamedTensor& named) {
    const at::Tensor& tensor = named.tensor;
    TORCH_CHECK_VALUE(dtype_name(tensor.scalar_type()), "save: '", named.name, "' is ",
                      tensor.scalar_type(), ", which safetensors files cannot hold");
    const SavedLayout layout = layout_of(tensor, world_size_, named.name);
    TensorRecord record{.dtype = tensor.scalar_type(), .shape = tensor.sizes().vec()};
    record.codec = named.codec;
    record.layout = static_cast<int64_t>(index_of(manifest_.layouts, layout));
    if (balanced_ && is_dtensor(tensor)) record.replica = least_loaded(layout, record);
    for (const auto& box : written_boxes(layout, record.shape, record.replica)) {
      load_[box.rank] += numel_of(box.box) * tensor.element_size();
    }
    return record;
  }

  int64_t least_loaded(const SavedLayout& layout, const TensorRecord& record) {
    const int64_t bytes =
        numel_of(whole_box(record.shape)) * static_cast<int64_t>(c10::elementSize(record.dtype));
    if (is_copied(layout) && bytes < kSmallBytes) return 0;
    std::pair<int64_t, int64_t> best{INT64_MAX, 0};
    for (int64_t replica = 0; replica < replica_count(layout); ++replica) {
      int64_t load = 0;
      for (const auto& box : written_boxes(layout, record.shape, replica)) load += load_[box.rank];
      best = std::min(best, {load, replica});
    }
    return best.second;
  }

  const int64_t world_size_;
  const bool balanced_;
  Manifest manifest_;
  std::map<int64_t, int64_t> load_;  // bytes by rank
};

// What layout_of() gives a plain tensor.
bool is_plain(const SavedLayout& layout, int64_t world_size) {
  return layout.mesh_shape == std::vector<int64_t>{world_size} && layout.mesh_names.empty() &&
         is_copied(layout);
}

// What `rank` writes of `item`: a file, and where it has several boxes of a tensor one
// more for the second ones, and so on. So a file has a tensor once, under its name.
std::vector<FileToWrite> files_of_item(const SaveItem& item, const Manifest& manifest,
                                       int64_t rank) {
  const auto& records = manifest.items.at(item.name).tensors;
  std::map<int64_t, FileToWrite> files;            // by the number of the box
  for (const NamedTensor& named : item.tensors) {  // in the order of the model
    const TensorRecord& record = records.at(named.name);
    const auto& layout = manifest.layouts[static_cast<size_t>(record.layout)];
    for (auto& written : written_boxes(layout, record.shape, record.replica)) {
      if (written.rank != rank) continue;
      Entry entry{.name = named.name, .tensor = named.name, .dtype = record.dtype};
      entry.box = std::move(written.box);
      entry.global_shape = record.shape;
      files[written.number].parts.push_back(
          {.entry = std::move(entry), .tensor = named.tensor, .begin = std::move(written.begin)});
    }
  }
  std::vector<FileToWrite> ordered;
  for (auto& [number, file] : files) {
    file.path = shard_path(item.name, rank, number);
    file.rank = rank;
    file.metadata = manifest.items.at(item.name).ties;
    lay_out(file);
    ordered.push_back(std::move(file));
  }
  return ordered;
}

// Adds the texts of list `more` that list `merged` lacks.
void add_new(Json& merged, const Json& more) {
  std::set<std::string> known;
  for (const Json& text : merged) known.insert(text.get<std::string>());
  for (const Json& text : more) {
    if (known.insert(text.get<std::string>()).second) merged.push_back(text);
  }
}

// Adds what another rank's optimizer has besides: groups with the parameters that no rank
// before had.
void merge_details(Json& merged, const Json& details, size_t rank) {
  if (!details.contains("groups")) return;
  const auto class_in = [](const Json& json) { return json.value("class", std::string()); };
  TORCH_CHECK_VALUE(class_in(merged) == class_in(details), "rank ", rank, "'s optimizer is ",
                    class_in(details), ", and an earlier rank's of the same name ",
                    class_in(merged));
  add_new(merged["scalars"], details.at("scalars"));
  merged["lists"].update(details.at("lists"));
  std::set<std::string> known;
  for (const Json& group : merged.at("groups")) {
    for (const Json& name : group.at("params")) known.insert(name.get<std::string>());
  }
  for (const Json& group : details.at("groups")) {
    Json added = {{"params", Json::array()}, {"options", group.at("options")}};
    for (const Json& name : group.at("params")) {
      if (known.count(name.get<std::string>()) == 0) added["params"].push_back(name);
    }
    if (!added["params"].empty()) merged["groups"].push_back(std::move(added));
  }
}

// But for the ranks.
bool are_cut_alike(const SavedLayout& one, const SavedLayout& other) {
  return one.mesh_shape == other.mesh_shape && one.mesh_names == other.mesh_names &&
         one.placements == other.placements;
}

// Of `rank`, which is in `layout`, the one at its place in `other`.
size_t counterpart(int64_t rank, const SavedLayout& layout, const SavedLayout& other) {
  const auto place = std::find(layout.ranks.begin(), layout.ranks.end(), rank);
  return static_cast<size_t>(other.ranks[static_cast<size_t>(place - layout.ranks.begin())]);
}

// Whether `rank` has on its slice what the known one has.
bool is_copy(const SavedLayout& layout, const SavedLayout& known, int64_t rank,
             const std::string& item, const std::string& tensor, const std::vector<Json>& hashes) {
  if (!are_cut_alike(layout, known) || hashes.empty()) return false;
  const auto hash_on = [&](size_t each) {
    return hashes[each].value(item, Json::object()).value(tensor, Json());
  };
  const Json own = hash_on(static_cast<size_t>(rank));
  return !own.is_null() && own == hash_on(counterpart(rank, layout, known));
}

// Adds what `rank` knows of item `name`.
void merge_item(Manifest& merged, const Manifest& plan, const std::string& name,
                const ItemRecord& item, size_t rank, const std::vector<Json>& hashes) {
  const ItemRecord empty{.kind = item.kind, .tensors = {}, .ties = {}, .details = item.details};
  ItemRecord& target = merged.items.try_emplace(name, empty).first->second;
  merge_details(target.details, item.details, rank);
  target.ties.insert(item.ties.begin(), item.ties.end());
  for (const auto& [tensor, theirs] : item.tensors) {
    const SavedLayout& layout = plan.layouts[static_cast<size_t>(theirs.layout)];
    TensorRecord record = theirs;
    record.layout = static_cast<int64_t>(index_of(merged.layouts, layout));
    if (is_plain(layout, merged.world_size)) record.replica = static_cast<int64_t>(rank);
    const auto [known, is_new] = target.tensors.emplace(tensor, record);
    const auto& known_layout = merged.layouts[static_cast<size_t>(known->second.layout)];
    const bool same =
        known->second.dtype == theirs.dtype && known->second.shape == theirs.shape &&
        (known_layout == layout ||
         is_copy(layout, known_layout, static_cast<int64_t>(rank), name, tensor, hashes));
    TORCH_CHECK_VALUE(is_new || same, "'", tensor, "' of '", name, "' has another shape, dtype, ",
                      "mesh or placement on rank ", rank,
                      " than on an earlier rank, or is another one with values of its own; what ",
                      "each rank has of its own (an expert, say) needs a name of its own");
  }
}

bool has(const Manifest& plan, const std::string& item, const std::string& tensor) {
  const auto found = plan.items.find(item);
  return found != plan.items.end() && found->second.tensors.count(tensor) != 0;
}

// Throws ValueError where a rank that should write a part of a tensor does not have it.
void check_held_by_its_ranks(const Manifest& merged, const std::vector<Manifest>& plans,
                             const std::string& name, const ItemRecord& item) {
  for (const auto& [tensor, record] : item.tensors) {
    const auto& layout = merged.layouts[static_cast<size_t>(record.layout)];
    if (is_plain(layout, merged.world_size)) continue;
    for (const int64_t rank : layout.ranks) {
      TORCH_CHECK_VALUE(has(plans[static_cast<size_t>(rank)], name, tensor), "'", tensor, "' of '",
                        name, "' is cut over ranks of which rank ", rank, " does not save it; ",
                        "SaveOptions::name_in_file must give the same names on all ranks");
    }
  }
}

}  // namespace

SavePlan plan_save(const std::vector<SaveItem>& items, int64_t rank, int64_t world_size,
                   bool balanced) {
  Planner planner(world_size, balanced);
  for (const SaveItem& item : items) planner.add(item);
  SavePlan plan{.manifest = planner.take()};
  plan.files = files_of_rank(items, plan.manifest, rank);
  return plan;
}

std::vector<FileToWrite> files_of_rank(const std::vector<SaveItem>& items, const Manifest& manifest,
                                       int64_t rank) {
  std::vector<FileToWrite> files;
  for (const SaveItem& item : items) {
    for (auto& file : files_of_item(item, manifest, rank)) files.push_back(std::move(file));
  }
  return files;
}

std::map<std::string, std::set<std::string>> names_on_slices(const std::vector<Manifest>& plans) {
  std::map<std::string, std::set<std::string>> names;
  std::map<std::pair<std::string, std::string>, const SavedLayout*> known;
  for (const Manifest& plan : plans) {
    for (const auto& [name, item] : plan.items) {
      for (const auto& [tensor, record] : item.tensors) {
        const auto& layout = plan.layouts[static_cast<size_t>(record.layout)];
        const auto& first = *known.try_emplace({name, tensor}, &layout).first->second;
        if (!(first == layout) && are_cut_alike(first, layout)) names[name].insert(tensor);
      }
    }
  }
  return names;
}

Json hashes_on_slices(const std::vector<SaveItem>& items,
                      const std::map<std::string, std::set<std::string>>& names) {
  Json hashes = Json::object();
  for (const SaveItem& item : items) {
    const auto wanted = names.find(item.name);
    if (wanted == names.end()) continue;
    for (const NamedTensor& named : item.tensors) {
      if (wanted->second.count(named.name) == 0) continue;
      hashes[item.name][named.name] = hash_of_values(local_value(named.tensor), /*seed=*/0);
    }
  }
  return hashes;
}

Manifest merge_plans(const std::vector<Manifest>& plans, const std::vector<Json>& hashes) {
  Manifest merged = plans.front();
  for (size_t rank = 1; rank < plans.size(); ++rank) {
    for (const auto& [name, item] : plans[rank].items) {
      merge_item(merged, plans[rank], name, item, rank, hashes);
    }
  }
  for (const auto& [name, item] : merged.items) check_held_by_its_ranks(merged, plans, name, item);
  return merged;
}

namespace {

constexpr int kIndexIndent = 2;
constexpr const char* kIndexSuffix = "/model.safetensors.index.json";

std::string full_path(const std::string& item, size_t number, size_t count) {
  if (count == 1) return item + "/model.safetensors";
  char name[64];
  std::snprintf(name, sizeof(name), "/model-%05zu-of-%05zu.safetensors", number + 1, count);
  return item + name;
}

// The whole of `named`, as it is saved.
PartToWrite whole_part(const SaveItem& item, const NamedTensor& named, int64_t world_size,
                       const SaveOptions& options) {
  const at::Tensor& tensor = named.tensor;
  layout_of(tensor, world_size, named.name);  // for its errors
  Entry entry{.name = named.name, .tensor = named.name, .dtype = tensor.scalar_type()};
  if (item.kind == "model" && options.model_dtype && c10::isFloatingType(entry.dtype)) {
    entry.dtype = *options.model_dtype;
  }
  TORCH_CHECK_VALUE(dtype_name(entry.dtype), "save: '", named.name, "' is ", entry.dtype,
                    ", which safetensors files cannot hold");
  entry.global_shape = tensor.sizes().vec();
  entry.box = whole_box(entry.global_shape);
  return {std::move(entry), tensor, named.unit};
}

// The parts of each file, in the order of the model.
std::vector<FileToWrite> cut(const SaveItem& item, int64_t world_size, const SaveOptions& options) {
  std::vector<FileToWrite> files;
  int64_t bytes = 0;
  for (const NamedTensor& named : item.tensors) {
    PartToWrite part = whole_part(item, named, world_size, options);
    const int64_t more = bytes_of(part.entry);
    if (files.empty() || bytes + more > options.max_file_bytes) {
      files.push_back({.kind = FileKind::kWhole, .metadata = item.ties});
      bytes = 0;
    }
    bytes += more;
    files.back().parts.push_back(std::move(part));
  }
  return files;
}

std::string index_text_of(const std::vector<FileToWrite>& files) {
  int64_t bytes = 0;
  Json weights = Json::object();
  for (const FileToWrite& file : files) {
    for (const PartToWrite& part : file.parts) {
      bytes += bytes_of(part.entry);
      weights[part.entry.name] = file.path.substr(file.path.rfind('/') + 1);
    }
  }
  const Json index = {{"metadata", {{"total_size", bytes}}}, {"weight_map", std::move(weights)}};
  return index.dump(kIndexIndent) + "\n";
}

}  // namespace

SavePlan plan_full(const std::vector<SaveItem>& items, int64_t world_size,
                   const SaveOptions& options) {
  SavePlan plan;
  plan.manifest.world_size = world_size;
  int64_t writer = 0;
  for (const SaveItem& item : items) {
    ItemRecord record{.kind = item.kind, .tensors = {}, .ties = item.ties, .details = item.details};
    std::vector<FileToWrite> files = cut(item, world_size, options);
    for (size_t i = 0; i < files.size(); ++i) {
      files[i].path = full_path(item.name, i, files.size());
      files[i].rank = writer++ % world_size;
      lay_out(files[i]);
      for (const PartToWrite& part : files[i].parts) {
        TensorRecord whole{.dtype = part.entry.dtype, .shape = part.entry.global_shape};
        whole.file = files[i].path;
        record.tensors.emplace(part.entry.name, std::move(whole));
      }
    }
    for (const auto& named : item.tensors) record.tensors.at(named.name).codec = named.codec;
    if (files.size() > 1) plan.texts[item.name + kIndexSuffix] = index_text_of(files);
    for (FileToWrite& file : files) plan.files.push_back(std::move(file));
    plan.manifest.items.emplace(item.name, std::move(record));
  }
  return plan;
}

}  // namespace fsdp::internal::checkpoint
