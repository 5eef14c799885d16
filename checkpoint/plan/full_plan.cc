#include "checkpoint/plan/full_plan.h"

#include "checkpoint/format/dtype.h"
#include "checkpoint/format/saved_layout.h"

#include <c10/util/Exception.h>

#include <cstdio>
#include <string>
#include <utility>

namespace fsdp::internal::checkpoint {
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

std::string index_of(const std::vector<FileToWrite>& files) {
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
    if (files.size() > 1) plan.texts[item.name + kIndexSuffix] = index_of(files);
    for (FileToWrite& file : files) plan.files.push_back(std::move(file));
    plan.manifest.items.emplace(item.name, std::move(record));
  }
  return plan;
}

}  // namespace fsdp::internal::checkpoint
