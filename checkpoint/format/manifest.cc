#include "checkpoint/format/manifest.h"

#include "checkpoint/files/checksums.h"
#include "checkpoint/files/errors.h"
#include "checkpoint/files/file_calls.h"
#include "checkpoint/files/file_checks.h"
#include "checkpoint/format/dtype.h"
#include "dtensor/layout/shard_layout.h"

#include <torch/version.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <random>
#include <set>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <utility>

namespace fsdp::internal::checkpoint {
namespace {

constexpr const char* kFormat = "fully_shard.checkpoint";
constexpr int64_t kVersion = 1;
constexpr const char* kNoSum = "0000000000000000";

Json layout_json(const SavedLayout& layout) {
  Json placements = Json::array();
  for (const Placement& each : layout.placements) placements.push_back(placement_text(each));
  return {{"mesh",
           {{"shape", layout.mesh_shape}, {"names", layout.mesh_names}, {"ranks", layout.ranks}}},
          {"placements", std::move(placements)}};
}

SavedLayout layout_from(const Json& json) {
  SavedLayout layout;
  const Json& mesh = json.at("mesh");
  layout.mesh_shape = integers_of(mesh.at("shape"));
  mesh.at("names").get_to(layout.mesh_names);
  layout.ranks = integers_of(mesh.at("ranks"));
  size_t ranks = 1;
  for (const int64_t size : layout.mesh_shape) ranks *= static_cast<size_t>(size);
  for (const auto& placement : json.at("placements")) {
    layout.placements.push_back(placement_from(placement.get<std::string>()));
  }
  if (ranks != layout.ranks.size() || layout.placements.size() != layout.mesh_shape.size()) {
    throw std::runtime_error("a layout does not fit its mesh");
  }
  return layout;
}

Json record_json(const TensorRecord& record) {
  Json json = {{"dtype", *dtype_name(record.dtype)}, {"shape", record.shape}};
  if (!record.codec.empty()) json["codec"] = record.codec;
  if (record.layout < 0) {
    json["file"] = record.file;
  } else {
    json["layout"] = record.layout, json["writer"] = record.replica;
  }
  return json;
}

// Only the first mesh dimension that cuts a tensor dimension has blocks and units, but
// for owners.
void check_cuts(const SavedLayout& layout, const std::vector<int64_t>& shape) {
  std::set<int64_t> cut;
  for (size_t m = 0; m < layout.placements.size(); ++m) {
    const Placement& placement = layout.placements[m];
    if (!placement.is_shard()) continue;
    const Shard& cut_by = placement.shard();
    const int64_t dim = cut_by.dim;
    if (dim < 0 || dim >= static_cast<int64_t>(shape.size())) {
      throw std::runtime_error("a layout cuts a dimension that its tensor lacks");
    }
    const bool is_first = cut.insert(dim).second;
    const int64_t size = shape[static_cast<size_t>(dim)];
    const bool fits = !placement.is_interleaved() ||
                      (is_well_formed(cut_by, layout.mesh_shape[m]) && divides(cut_by, size));
    if (!fits || !(is_first || placement.can_lie_inside_a_cut())) {
      throw std::runtime_error("a layout cuts a dimension in blocks or units that do not fit");
    }
  }
}

TensorRecord tensor_from(const Json& json, const std::vector<SavedLayout>& layouts) {
  TensorRecord record;
  const auto dtype = dtype_of(json.at("dtype").get<std::string>());
  if (!dtype) throw std::runtime_error("unknown dtype " + json.at("dtype").dump());
  record.dtype = *dtype;
  record.shape = integers_of(json.at("shape"));
  if (!can_be_shape(record.shape)) throw std::runtime_error("impossible shape of a tensor");
  if (json.contains("codec")) json.at("codec").get_to(record.codec);
  if (json.contains("file")) {
    json.at("file").get_to(record.file);
    return record;
  }
  json.at("layout").get_to(record.layout);
  json.at("writer").get_to(record.replica);
  if (record.layout < 0 || static_cast<size_t>(record.layout) >= layouts.size()) {
    throw std::runtime_error("a tensor of a layout that it does not have");
  }
  check_cuts(layouts[static_cast<size_t>(record.layout)], record.shape);
  return record;
}

Json item_json(const ItemRecord& item) {
  Json json = item.details;
  json["kind"] = item.kind;
  json["ties"] = item.ties;
  json["tensors"] = Json::object();
  for (const auto& [name, record] : item.tensors) json["tensors"][name] = record_json(record);
  return json;
}

ItemRecord item_from(Json json, const std::vector<SavedLayout>& layouts) {
  ItemRecord item;
  json.at("kind").get_to(item.kind);
  json.at("ties").get_to(item.ties);
  for (const auto& [name, record] : json.at("tensors").items()) {
    item.tensors.emplace(name, tensor_from(record, layouts));
  }
  for (const char* key : {"kind", "ties", "tensors"}) json.erase(key);
  item.details = std::move(json);
  return item;
}

Manifest manifest_from(const Json& json) {
  Manifest manifest;
  json.at("save_id").get_to(manifest.save_id);
  json.at("step").get_to(manifest.step);
  json.at("saved_at").get_to(manifest.saved_at);
  json.at("world_size").get_to(manifest.world_size);
  for (const auto& [path, file] : json.at("files").items()) {
    if (!stays_in_folder(path)) {
      throw std::runtime_error("it lists the file '" + path +
                               "', which lies outside of its folder");
    }
    manifest.files[path] = {file.at("rank").get<int64_t>(), file.at("bytes").get<int64_t>(),
                            file.at("xxh3").get<std::string>()};
  }
  for (const auto& layout : json.at("layouts")) manifest.layouts.push_back(layout_from(layout));
  for (const auto& [name, item] : json.at("items").items()) {
    manifest.items.emplace(name, item_from(item, manifest.layouts));
  }
  manifest.values = json.at("values");
  manifest.scheduler = json.at("scheduler");
  json.at("per_rank").get_to(manifest.per_rank);
  return manifest;
}

// Where in `text` the file's own checksum stands.
size_t self_position(const std::string& text) {
  constexpr std::string_view kKey = "\"self\":\"";
  const size_t key = text.find(kKey);
  return key == std::string::npos || key + kKey.size() + 16 > text.size() ? std::string::npos
                                                                          : key + kKey.size();
}

absl::Status check_file_is_itself(const std::string& path) {
  const auto file = InputFile::open(path);
  if (!file.ok()) return file.status();
  const auto begin = beginning_of(*file);
  return begin.ok() ? check_is_itself(*begin, path) : begin.status();
}

}  // namespace

std::string new_save_id() {
  std::random_device random;
  const uint64_t number = (uint64_t{random()} << 32) ^ random();
  return checksum_text({reinterpret_cast<const char*>(&number), sizeof(number)});
}

int64_t now_ns() {
  using std::chrono::nanoseconds;
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<nanoseconds>(now).count();
}

std::string shard_path(const std::string& item, int64_t rank, int64_t number) {
  char name[64];
  if (number > 0) {
    std::snprintf(name, sizeof(name), "/shard-%05lld-box-%05lld.safetensors",
                  static_cast<long long>(rank + 1), static_cast<long long>(number + 1));
    return item + name;
  }
  std::snprintf(name, sizeof(name), "/shard-%05lld-model-00001-of-00001.safetensors",
                static_cast<long long>(rank + 1));
  return item + name;
}

std::string rank_path(int64_t rank) {
  char name[48];
  std::snprintf(name, sizeof(name), "ranks/%05lld.safetensors", static_cast<long long>(rank));
  return name;
}

std::string format_manifest(const Manifest& manifest) {
  nlohmann::ordered_json json = {{"format", kFormat},
                                 {"version", kVersion},
                                 {"self", kNoSum},
                                 {"save_id", manifest.save_id},
                                 {"step", manifest.step},
                                 {"saved_at", manifest.saved_at},
                                 {"world_size", manifest.world_size},
                                 {"torch", TORCH_VERSION},
                                 {"library", "0.1.0"}};
  Json files = Json::object(), items = Json::object(), layouts = Json::array();
  for (const auto& [path, file] : manifest.files) {
    files[path] = {{"rank", file.rank}, {"bytes", file.bytes}, {"xxh3", file.checksum}};
  }
  for (const auto& layout : manifest.layouts) layouts.push_back(layout_json(layout));
  for (const auto& [name, item] : manifest.items) items[name] = item_json(item);
  json["files"] = files;
  json["layouts"] = layouts;
  json["items"] = items;
  json["values"] = manifest.values;
  json["scheduler"] = manifest.scheduler;
  json["per_rank"] = manifest.per_rank;
  std::string text = json.dump();
  return text.replace(self_position(text), 16, checksum_text(text));
}

absl::StatusOr<Manifest> parse_manifest(const std::string& text, const std::string& path) {
  if (auto itself = check_is_itself(text, path); !itself.ok()) return itself;
  auto json = parse_json(text, path);
  if (!json.ok()) return json.status();
  try {
    if (json->at("format") != kFormat) {
      return absl::DataLossError(path + ": not a checkpoint's manifest");
    }
    if (const auto version = json->at("version").get<int64_t>(); version != kVersion) {
      return absl::DataLossError(path + ": version " + std::to_string(version) +
                                 "; this library reads version " + std::to_string(kVersion));
    }
    const size_t self = self_position(text);
    std::string unsigned_text = text;
    if (self == std::string::npos ||
        checksum_text(unsigned_text.replace(self, 16, kNoSum)) != text.substr(self, 16)) {
      return absl::DataLossError(path + ": its checksum is wrong: the file was damaged");
    }
    return manifest_from(*json);
  } catch (const std::exception& error) {
    return absl::DataLossError(path + ": not a checkpoint's manifest: " + plain_text_of(error));
  }
}

absl::StatusOr<Manifest> read_manifest(const std::string& folder) {
  const std::string path = folder + "/" + kManifestName;
  auto text = read_file(path);
  if (!text.ok()) return text.status();
  auto manifest = parse_manifest(*text, path);
  if (!manifest.ok()) return manifest;
  for (const auto& [name, record] : manifest->files) {
    const std::string file = folder + "/" + name;
    std::error_code error;
    const auto bytes = std::filesystem::file_size(file, error);
    if (error) return absl::DataLossError(file + ": " + error.message());
    if (static_cast<int64_t>(bytes) != record.bytes) {
      if (auto itself = check_file_is_itself(file); !itself.ok()) return itself;
      return absl::DataLossError(file + ": has " + std::to_string(bytes) + " bytes, and " +
                                 std::to_string(record.bytes) + " were saved");
    }
  }
  return manifest;
}

}  // namespace fsdp::internal::checkpoint
