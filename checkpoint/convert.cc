#include "checkpoint/convert.h"

#include "checkpoint/files/checksums.h"
#include "checkpoint/files/errors.h"
#include "checkpoint/files/file_calls.h"
#include "checkpoint/format/catalog/catalog.h"
#include "checkpoint/format/catalog/foreign_files.h"
#include "checkpoint/format/dtype.h"
#include "checkpoint/io/commit.h"
#include "checkpoint/io/file_writing.h"
#include "checkpoint/io/tensor_reader.h"
#include "checkpoint/plan/names_in_file.h"
#include "checkpoint/plan/save_plan.h"
#include "checkpoint/plan/state_items.h"
#include "checkpoint/ranks/world.h"

#include <c10/util/Exception.h>

#include <filesystem>
#include <numeric>
#include <system_error>
#include <utility>
#include <vector>

namespace fsdp {
namespace {

using namespace internal::checkpoint;  // NOLINT: this file is its front

struct Source {
  Manifest manifest;  // values, step and the like
  std::vector<SaveItem> items;
};

// All tensors of a catalog, whole.
SaveItem read_item(const std::string& name, const Catalog& catalog, const std::string& what) {
  SaveItem item{.name = name, .kind = "model", .tensors = {}, .ties = catalog.ties};
  TensorReader reader(catalog, {.verify = true});
  for (const auto& [each, unused] : catalog.tensors) {
    item.tensors.push_back({.name = each,
                            .tensor = value_or_raise(reader.plan_whole(each)),
                            .codec = catalog.tensors.at(each).codec});
  }
  raise_unless_ok(reader.read());
  std::vector<std::string> left;
  for (const auto& [other, each] : catalog.unread)
    left.push_back("'" + other + "' is " + each.what);
  if (!left.empty()) {
    TORCH_WARN(what, ": left out, since it is not read: ", list_of(left));
  }
  return item;
}

Source read_source(const std::string& place, const std::string& what) {
  std::error_code error;
  TORCH_CHECK(std::filesystem::exists(place, error), "no such checkpoint");
  auto manifest = read_manifest(place);
  Source source;
  if (!manifest.ok()) {
    if (!absl::IsNotFound(manifest.status()) && std::filesystem::is_directory(place)) {
      raise_unless_ok(manifest.status());
    }
    source.items.push_back(read_item("model", value_or_raise(catalog_of_files(place)), what));
    return source;
  }
  for (const auto& [name, record] : manifest->items) {
    SaveItem item = read_item(name, value_or_raise(catalog_of_item(place, *manifest, name)), what);
    item.kind = record.kind;
    item.details = record.details;
    source.items.push_back(std::move(item));
  }
  source.manifest = *std::move(manifest);
  return source;
}

SavedLayout layout_over(int64_t ranks, bool is_cut) {
  SavedLayout layout{.mesh_shape = {ranks}, .mesh_names = {}, .ranks = {}, .placements = {}};
  layout.ranks.resize(static_cast<size_t>(ranks));
  std::iota(layout.ranks.begin(), layout.ranks.end(), 0);
  layout.placements = {is_cut ? Placement(Shard{0}) : Placement(Replicate{})};
  return layout;
}

// As if `ranks` ranks saved, each its rows; all files are written by this process.
SavePlan plan_sharded(const std::vector<SaveItem>& items, int64_t ranks) {
  SavePlan plan;
  plan.manifest.world_size = ranks;
  plan.manifest.layouts = {layout_over(ranks, /*is_cut=*/true), layout_over(ranks, false)};
  for (const SaveItem& item : items) {
    ItemRecord record{.kind = item.kind, .tensors = {}, .ties = item.ties, .details = item.details};
    std::map<int64_t, FileToWrite> files;
    for (const auto& [name, tensor, unit, codec] : item.tensors) {
      TORCH_CHECK_VALUE(dtype_name(tensor.scalar_type()), "'", name, "' is ", tensor.scalar_type(),
                        ", which safetensors files cannot hold");
      TensorRecord placed{.dtype = tensor.scalar_type(), .shape = tensor.sizes().vec()};
      placed.layout = tensor.dim() > 0 ? 0 : 1;
      placed.codec = codec;
      const auto& layout = plan.manifest.layouts[static_cast<size_t>(placed.layout)];
      for (const auto& written : written_boxes(layout, placed.shape, /*replica=*/0)) {
        Entry entry{.name = name, .tensor = name, .dtype = placed.dtype, .box = written.box};
        entry.global_shape = placed.shape;
        files[written.rank].parts.push_back(
            {.entry = std::move(entry), .tensor = tensor, .begin = offsets_of(written.box)});
      }
      record.tensors.emplace(name, std::move(placed));
    }
    for (auto& [rank, file] : files) {
      file.path = shard_path(item.name, rank, /*number=*/0);
      file.metadata = item.ties;
      lay_out(file);
      plan.files.push_back(std::move(file));
    }
    plan.manifest.items.emplace(item.name, std::move(record));
  }
  return plan;
}

void check_convert_options(const ConvertOptions& options) {
  TORCH_CHECK_VALUE(options.ranks >= 1, "ConvertOptions::ranks is ", options.ranks,
                    "; it must be 1 or more");
  TORCH_CHECK_VALUE(options.max_file_bytes >= 1, "ConvertOptions::max_file_bytes is ",
                    options.max_file_bytes, "; it must be 1 or more");
  TORCH_CHECK_VALUE(!options.model_dtype || options.layout == Layout::kFull,
                    "ConvertOptions::model_dtype is of Layout::kFull only");
}

SavePlan plan_for(const std::vector<SaveItem>& items, const ConvertOptions& options) {
  if (options.layout == Layout::kSharded) return plan_sharded(items, options.ranks);
  SaveOptions save;
  save.model_dtype = options.model_dtype;
  save.max_file_bytes = options.max_file_bytes;
  return plan_full(items, /*world_size=*/1, save);
}

// The same error, told of `what`.
absl::Status within(const std::string& what, const absl::Status& status) {
  if (status.ok()) return status;
  return absl::Status(status.code(), what + ": " + std::string(status.message()));
}

// What `work` throws begins with "convert: place: ".
template <class Work>
void told_of(const std::string& place, const Work& work) {
  const std::string what = "convert: " + place;
  Failure failure = attempt([&] { work(place, what); });
  if (failure.text.empty()) return;
  if (failure.text.starts_with(place + ": ")) failure.text.erase(0, place.size() + 2);
  throw_any({{0, failure}}, /*is_alone=*/true, what);
}

}  // namespace

void convert_checkpoint(const std::string& from, const std::string& to, ConvertOptions options) {
  check_convert_options(options);
  Source source;
  SavePlan plan;
  told_of(readable_path(normal_path(from)), [&](const std::string& place, const std::string& what) {
    source = read_source(place, what);
    check_savable(source.items);
    rename_in_file(source.items, options.name_in_file, "ConvertOptions::name_in_file");
    plan = plan_for(source.items, options);
  });
  std::vector<std::string> folders;
  for (const SaveItem& item : source.items) folders.push_back(item.name);
  const std::string path = normal_path(to), id = new_save_id();
  auto commit = Commit::begin(path, id, folders, options.overwrite);
  raise_unless_ok(within("convert to " + to, commit.status()));
  const std::string folder = staging_path(path, id);

  FileWriting writing(folder, /*rank=*/0);
  StagingBuffer unused;
  writing.take(
      std::move(plan.files), [](FileKind, const at::Tensor& part) { return part; }, unused,
      /*staged_bytes=*/0);
  auto& files = plan.manifest.files;
  for (const auto& [name, file] : value_or_raise(writing.finish())) {
    files[name] = {0, file.bytes, file.checksum};
  }
  for (const auto& [name, text] : plan.texts) {
    raise_unless_ok(write_file(folder + "/" + name, text));
    files[name] = {0, static_cast<int64_t>(text.size()), checksum_text(text)};
  }
  plan.manifest.save_id = id;
  plan.manifest.step = source.manifest.step;
  plan.manifest.saved_at = now_ns();
  plan.manifest.values = std::move(source.manifest.values);
  plan.manifest.scheduler = std::move(source.manifest.scheduler);
  raise_unless_ok(commit->finish(format_manifest(plan.manifest)));
  commit->tidy(/*keep_last=*/0);
}

}  // namespace fsdp
