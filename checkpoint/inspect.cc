// describe_checkpoint(), and verify_checkpoint() of checkpoint.h.
#include "checkpoint/inspect.h"

#include "checkpoint/checkpoint.h"
#include "checkpoint/files/checksums.h"
#include "checkpoint/files/errors.h"
#include "checkpoint/format/catalog/catalog.h"
#include "checkpoint/format/catalog/foreign_files.h"
#include "checkpoint/format/dtype.h"
#include "checkpoint/format/saved_layout.h"
#include "checkpoint/io/commit.h"
#include "checkpoint/io/verified_file.h"

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <map>
#include <vector>

namespace fsdp {
namespace {

using namespace internal::checkpoint;  // NOLINT: this file is its front

constexpr int64_t kSecond = 1'000'000'000;  // in nanoseconds

std::string time_text(int64_t nanoseconds) {
  const std::time_t seconds = nanoseconds / kSecond;
  std::tm parts{};
  gmtime_r(&seconds, &parts);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%d %H:%M:%S UTC", &parts);
  return text;
}

std::string bytes_text(int64_t bytes) {
  constexpr std::array<const char*, 5> kUnits = {"bytes", "kB", "MB", "GB", "TB"};
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  for (; value >= 1000 && unit + 1 < kUnits.size(); ++unit) value /= 1000;
  char text[32];
  std::snprintf(text, sizeof(text), unit == 0 ? "%.0f %s" : "%.2f %s", value, kUnits[unit]);
  return text;
}

std::string list_text(const std::vector<int64_t>& numbers) {
  std::string text = "[";
  for (const int64_t number : numbers) {
    text += (text.size() > 1 ? ", " : "") + std::to_string(number);
  }
  return text + "]";
}

// "S(0) R over 2 x 2 ranks", or the number of boxes where there is no manifest.
std::string layout_text(const SavedLayout& layout) {
  std::string placements, shape;
  for (size_t i = 0; i < layout.mesh_shape.size(); ++i) {
    placements += internal::checkpoint::placement_text(layout.placements[i]) + " ";
    shape += (i > 0 ? " x " : "") + std::to_string(layout.mesh_shape[i]);
  }
  return placements + "over " + shape + (layout.ranks.size() == 1 ? " rank" : " ranks");
}

std::string layout_of(const StoredTensor& tensor, const std::string& name, const Manifest* manifest,
                      const std::string& item) {
  if (manifest != nullptr) {
    const int64_t layout = manifest->items.at(item).tensors.at(name).layout;
    return layout < 0 ? "whole" : layout_text(manifest->layouts[static_cast<size_t>(layout)]);
  }
  if (tensor.boxes.size() > 1) return std::to_string(tensor.boxes.size()) + " boxes";
  const bool is_part = !tensor.boxes.empty() && tensor.boxes[0].box != whole_box(tensor.shape);
  return is_part ? "1 box" : "whole";
}

// "F32", or what PyTorch calls a dtype that safetensors files do not have.
std::string dtype_text(c10::ScalarType dtype) {
  return dtype_name(dtype).value_or(c10::toString(dtype));
}

using Row = std::array<std::string, 5>;

std::string table(const std::vector<Row>& rows) {
  std::array<size_t, std::tuple_size_v<Row>> widths{};
  for (const Row& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const Row& row : rows) {
    std::string line = "   ";
    for (size_t i = 0; i < row.size(); ++i) {
      line += " " + row[i] + std::string(widths[i] - row[i].size() + 1, ' ');
    }
    text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
  }
  return text;
}

std::string describe_item(const std::string& item, const Catalog& catalog,
                          const Manifest* manifest) {
  std::vector<Row> rows;
  int64_t all = 0;
  for (const auto& [name, tensor] : catalog.tensors) {
    const int64_t bytes =
        numel_of(whole_box(tensor.shape)) * static_cast<int64_t>(c10::elementSize(tensor.dtype));
    all += bytes;
    rows.push_back({name, dtype_text(tensor.dtype), list_text(tensor.shape), bytes_text(bytes),
                    layout_of(tensor, name, manifest, item)});
  }
  std::string text = "  " + item + ": " + std::to_string(rows.size()) + " tensors, " +
                     bytes_text(all) + "\n" + table(rows);
  for (const auto& [other, first] : catalog.ties) text += "    " + other + " is " + first + "\n";
  for (const auto& [name, each] : catalog.unread) {
    text += "    not read: " + name + ", " + each.what + "\n";
  }
  return text;
}

std::string describe_rest(const Manifest& manifest) {
  std::string text;
  for (const auto& [name, value] : manifest.values.items()) {
    text += "  value " + name + ": " + value.dump() + "\n";
  }
  if (!manifest.scheduler.is_null()) text += "  scheduler: " + manifest.scheduler.dump() + "\n";
  if (!manifest.per_rank.empty()) text += "  per rank: " + list_of(manifest.per_rank) + "\n";
  int64_t bytes = 0;
  for (const auto& [name, file] : manifest.files) bytes += file.bytes;
  return text + "  " + std::to_string(manifest.files.size()) + " files, " + bytes_text(bytes) +
         "\n";
}

}  // namespace

std::string describe_checkpoint(const std::string& path) {
  const std::string place = readable_path(normal_path(path));
  auto manifest = read_manifest(place);
  std::string text = place + "\n";
  if (!manifest.ok()) {
    if (!absl::IsNotFound(manifest.status()) && std::filesystem::is_directory(place)) {
      raise_unless_ok(manifest.status());
    }
    return text + describe_item("tensors", value_or_raise(catalog_of_files(place)), nullptr);
  }
  text += manifest->step < 0 ? "  " : "  step " + std::to_string(manifest->step) + ", ";
  text += "saved " + time_text(manifest->saved_at) + " by " + std::to_string(manifest->world_size) +
          (manifest->world_size == 1 ? " rank\n" : " ranks\n");
  for (const auto& [item, record] : manifest->items) {
    text +=
        describe_item(item, value_or_raise(catalog_of_item(place, *manifest, item)), &*manifest);
  }
  return text + describe_rest(*manifest);
}

namespace {

bool is_text(const std::string& name) { return name.ends_with(".json"); }

void verify_text(const std::string& path, const FileRecord& record) {
  const std::string text = value_or_raise(read_file(path));
  TORCH_CHECK(checksum_text(text) == record.checksum, path, ": its checksum is wrong");
}

// Every tensor is in the files that the manifest says, and the boxes make it up.
void verify_item(const Catalog& catalog, std::map<size_t, VerifiedFile>& open) {
  for (const auto& [name, tensor] : catalog.tensors) {
    int64_t covered = 0;
    for (const StoredBox& box : tensor.boxes) {
      auto file = open.find(box.file);
      if (file == open.end()) {
        auto opened = value_or_raise(VerifiedFile::open(catalog.files[box.file], /*verify=*/false));
        file = open.emplace(box.file, std::move(opened)).first;
      }
      value_or_raise(file->second.find(name, box, tensor.dtype));
      covered += numel_of(box.box);
    }
    TORCH_CHECK(covered == numel_of(whole_box(tensor.shape)), "'", name, "': ", covered, " of its ",
                numel_of(whole_box(tensor.shape)), " elements are in the files");
  }
}

}  // namespace

void verify_checkpoint(const std::string& path) {
  const std::string folder = readable_path(normal_path(path));
  const Manifest manifest = value_or_raise(read_manifest(folder));
  for (const auto& [name, record] : manifest.files) {
    const std::string place = folder + "/" + name;
    if (is_text(name)) {
      verify_text(place, record);
      continue;
    }
    auto file =
        value_or_raise(VerifiedFile::open({place, record.bytes, record.checksum}, /*verify=*/true));
    raise_unless_ok(file.verify_all());
  }
  for (const auto& [item, record] : manifest.items) {
    std::map<size_t, VerifiedFile> open;
    verify_item(value_or_raise(catalog_of_item(folder, manifest, item)), open);
  }
}

}  // namespace fsdp
