#include "checkpoint/format/catalog/foreign_files.h"

#include "checkpoint/files/errors.h"
#include "checkpoint/files/file_calls.h"
#include "checkpoint/format/catalog/dcp_folder.h"
#include "checkpoint/format/json.h"
#include "checkpoint/format/safetensors.h"
#include "checkpoint/format/torch_file/torch_file.h"

#include <algorithm>
#include <exception>
#include <filesystem>
#include <map>
#include <set>
#include <string_view>
#include <system_error>
#include <utility>

namespace fsdp::internal::checkpoint {
namespace {

constexpr std::string_view kIndexEnding = ".index.json";
constexpr std::string_view kDigits = "0123456789";

// "model.fp16-00001-of-00002" -> "model.fp16"
std::string_view without_number(std::string_view stem) {
  constexpr std::string_view kOf = "-of-";
  const size_t of = stem.rfind(kOf);
  if (of == std::string_view::npos) return stem;
  if (stem.find_first_not_of(kDigits, of + kOf.size()) != std::string_view::npos) return stem;
  const size_t dash = stem.substr(0, of).find_last_not_of(kDigits);
  return dash != std::string_view::npos && stem[dash] == '-' ? stem.substr(0, dash) : stem;
}

std::string stem_of(const std::string& name, std::string_view extension) {
  return std::string(
      without_number(std::string_view(name).substr(0, name.size() - extension.size())));
}

// The names that end so and are weights: of .bin files, what is called a model.
std::vector<std::string> files_with(const std::vector<std::string>& names,
                                    std::string_view extension) {
  std::vector<std::string> found;
  for (const std::string& name : names) {
    const bool is_hidden = name.starts_with('.');
    const bool is_model = extension != ".bin" || name.find("model") != std::string::npos;
    if (name.ends_with(extension) && !is_hidden && is_model) found.push_back(name);
  }
  std::sort(found.begin(), found.end());
  return found;
}

// Empty, or the one that `extension` files are named by.
std::string index_of(const std::vector<std::string>& names, std::string_view extension) {
  const auto indices = files_with(names, std::string(extension) + std::string(kIndexEnding));
  if (indices.empty()) return {};
  const std::string usual = "model" + std::string(extension) + std::string(kIndexEnding);
  return std::count(indices.begin(), indices.end(), usual) != 0 ? usual : indices.front();
}

WeightFiles without_variants(const std::vector<std::string>& files, std::string_view extension) {
  std::set<std::string> stems;
  for (const std::string& name : files) stems.insert(stem_of(name, extension));
  WeightFiles found;
  for (const std::string& name : files) {
    const std::string stem = stem_of(name, extension);
    const std::string plain = stem.substr(0, stem.rfind('.'));
    if (plain == stem || stems.count(plain) == 0) {
      found.names.push_back(name);
    } else {
      found.variants.push_back({name, "a variant of '" + plain + std::string(extension) +
                                          "'; it is read where its own path is given"});
    }
  }
  return found;
}

}  // namespace

WeightFiles weight_files(const std::vector<std::string>& names) {
  for (const std::string_view extension : {".safetensors", ".bin"}) {
    if (auto index = index_of(names, extension); !index.empty()) return {.index = std::move(index)};
    WeightFiles found = without_variants(files_with(names, extension), extension);
    if (!found.names.empty()) return found;
  }
  return {};
}

namespace {

namespace fs = std::filesystem;

// The files to read, and, where an index says, in which of them each tensor is.
struct Files {
  std::set<std::string> paths = {};
  std::map<std::string, std::string> path_of = {};  // by tensor

  // Whether the tensor is read from the file at `path`, should that hold one so called.
  bool may_be_in(const std::string& path, const std::string& tensor) const {
    const auto found = path_of.find(tensor);
    return found == path_of.end() || found->second == path;
  }
};

// What an index says; its own path, or that of a folder's.
absl::StatusOr<Files> files_of_index(const std::string& path) {
  const auto text = read_file(path);
  if (!text.ok()) return text.status();
  if (auto itself = check_is_itself(*text, path); !itself.ok()) return itself;
  const auto json = parse_json(*text, path);
  if (!json.ok()) return json.status();
  if (!json->is_object() || !json->contains("weight_map") || !json->at("weight_map").is_object()) {
    return absl::DataLossError(path + ": not an index of weights: it has no weight_map");
  }
  const std::string folder = fs::path(path).parent_path().string();
  Files files;
  for (const auto& [tensor, file] : json->at("weight_map").items()) {
    if (!file.is_string()) {
      return absl::DataLossError(path + ": its weight_map names no file for '" + tensor + "'");
    }
    const auto name = file.get<std::string>();
    if (!stays_in_folder(name)) return absl::DataLossError(outside_of_folder(path, name, tensor));
    const std::string place = (folder.empty() ? "" : folder + "/") + name;
    files.paths.insert(place);
    files.path_of.emplace(tensor, place);
  }
  if (!files.paths.empty()) return files;
  return absl::DataLossError(path + ": an index that names no tensors");
}

// Adds one file's entry. A global shape that is not known is what its boxes reach.
void add_entry(Catalog& catalog, const Entry& entry, size_t file) {
  if (!entry.unread.empty()) return catalog.leave_out(entry.tensor, entry.unread);
  if (catalog.unread.count(entry.tensor) != 0) return;
  auto [place, is_new] = catalog.tensors.try_emplace(entry.tensor);
  StoredTensor& stored = place->second;
  if (is_new) stored.dtype = entry.dtype, stored.shape = entry.global_shape;
  if (stored.dtype != entry.dtype || stored.shape.size() != entry.global_shape.size() ||
      (entry.knows_global_shape && !is_new && stored.shape != entry.global_shape)) {
    return catalog.leave_out(entry.tensor, "a tensor that has another dtype or shape in " +
                                               catalog.files[file].path + " than in " +
                                               catalog.files[stored.boxes.front().file].path);
  }
  for (size_t dim = 0; dim < stored.shape.size(); ++dim) {
    stored.shape[dim] = std::max(stored.shape[dim], entry.global_shape[dim]);
  }
  if (!can_be_shape(stored.shape)) return catalog.leave_out(entry.tensor, "of impossible sizes");
  stored.boxes.push_back({.file = file, .box = entry.box});
}

// A box of a tensor that is cut may be in any file.
bool is_cut(const Entry& entry) {
  return !entry.knows_global_shape || entry.box != whole_box(entry.global_shape);
}

absl::Status add_safetensors(Catalog& catalog, const InputFile& file, const Files& files) {
  const auto header = read_header(file);
  if (!header.ok()) return header.status();
  catalog.files.push_back({.path = file.path(), .bytes = file.bytes(), .checksum = {}});
  for (const Entry& entry : header->entries) {
    if (is_cut(entry) || files.may_be_in(file.path(), entry.tensor)) {
      add_entry(catalog, entry, catalog.files.size() - 1);
    }
  }
  for (const auto& [dropped, kept] : header->metadata) catalog.ties.emplace(dropped, kept);
  return absl::OkStatus();
}

void add_archived(Catalog& catalog, ArchivedTensor tensor, size_t file) {
  if (catalog.unread.count(tensor.name) != 0) return;
  const auto [place, is_new] = catalog.tensors.try_emplace(tensor.name);
  StoredTensor& stored = place->second;
  if (!is_new && stored.boxes.front().file == file) {
    return catalog.leave_out(tensor.name, "two tensors of one name");
  }
  if (!is_new) {  // of two files, for which it is left out
    stored.boxes.push_back(stored.boxes.front());
    stored.boxes.back().file = file;
    return;
  }
  stored.dtype = tensor.dtype;
  stored.boxes.push_back({.file = file, .box = whole_box(tensor.shape)});
  stored.shape = std::move(tensor.shape);
  StoredElements& elements = stored.boxes.back().elements;
  elements = {.begin = tensor.begin, .strides = std::move(tensor.strides)};
  elements.conj = tensor.conj, elements.neg = tensor.neg;
}

absl::Status add_archive(Catalog& catalog, const InputFile& file, const Files& files,
                         absl::StatusOr<ArchivedTensors> found) {
  if (!found.ok()) return found.status();
  catalog.files.push_back({.path = file.path(), .bytes = file.bytes(), .has_header = false});
  for (Unread& each : found->unread) {
    const bool is_known = catalog.tensors.count(each.name) != 0;
    if (is_known || !files.may_be_in(file.path(), each.name)) continue;
    catalog.unread.emplace(each.name, each);
  }
  for (ArchivedTensor& each : found->tensors) {
    if (!files.may_be_in(file.path(), each.name)) continue;
    add_archived(catalog, std::move(each), catalog.files.size() - 1);
  }
  return absl::OkStatus();
}

absl::Status add_file(Catalog& catalog, const std::string& path, const Files& files) {
  const auto file = InputFile::open(path);
  if (!file.ok()) return file.status();
  const auto begin = beginning_of(*file);
  if (!begin.ok()) return begin.status();
  switch (format_of(*begin)) {
    case FileFormat::kSafetensors:
      return add_safetensors(catalog, *file, files);
    case FileFormat::kTorchZip:
      return add_archive(catalog, *file, files, tensors_of_archive(*file, 0, file->bytes()));
    case FileFormat::kTorchLegacy:
      return add_archive(catalog, *file, files, tensors_of_legacy_file(*file));
    case FileFormat::kJson:
      return absl::DataLossError(path + ": a JSON text, which holds no tensors");
    case FileFormat::kOther:
      break;
  }
  return absl::DataLossError(path + ": " + describe_format(*begin));
}

absl::StatusOr<Files> files_of_folder(const std::string& path, Catalog& catalog) {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(path, error)) {
    names.push_back(entry.path().filename().string());
  }
  WeightFiles found = weight_files(names);
  if (!found.index.empty()) return files_of_index(path + "/" + found.index);
  for (Unread& each : found.variants) catalog.unread.emplace(each.name, each);
  Files files;
  for (const std::string& name : found.names) files.paths.insert(path + "/" + name);
  if (!files.paths.empty()) return files;
  std::sort(names.begin(), names.end());
  return absl::NotFoundError(path + ": neither a checkpoint nor a folder of safetensors files or " +
                             "of torch.save's; it holds " +
                             (names.empty() ? "nothing" : list_of(names)));
}

// One path, or what an index or a folder leads to.
absl::StatusOr<Files> files_at(const std::string& path, Catalog& catalog) {
  std::error_code error;
  if (fs::is_directory(path, error)) return files_of_folder(path, catalog);
  const auto file = InputFile::open(path);
  if (!file.ok()) return file.status();
  const auto begin = beginning_of(*file);
  if (!begin.ok()) return begin.status();
  if (format_of(*begin) == FileFormat::kJson) return files_of_index(path);
  return Files{.paths = {path}};
}

// Why these boxes of a tensor are not read: where two overlap, nothing says which counts.
std::string why_ambiguous(const Catalog& catalog, const StoredBox& one, const StoredBox& other) {
  if (one.file == other.file) return "a tensor with a box twice";
  return "in two files, " + catalog.files[one.file].path + " and " +
         catalog.files[other.file].path + ", and no index says which counts; give the path of one";
}

// Leaves out what a file has as another has it, too, where no index decides.
void leave_out_ambiguous(Catalog& catalog) {
  std::vector<std::pair<std::string, std::string>> ambiguous;  // each with the reason
  for (const auto& [name, stored] : catalog.tensors) {
    if (stored.boxes.size() < 2) continue;
    std::vector<Box> boxes;
    for (const StoredBox& each : stored.boxes) boxes.push_back(each.box);
    const auto overlap = find_overlap(boxes);
    if (!overlap) continue;
    ambiguous.emplace_back(
        name, why_ambiguous(catalog, stored.boxes[overlap->first], stored.boxes[overlap->second]));
  }
  for (const auto& [name, why] : ambiguous) catalog.leave_out(name, why);
}

// An index may name what its files lack, which is no tensor of theirs: only who asks for
// it misses it.
void tell_absent(Catalog& catalog, const Files& files) {
  for (const auto& [tensor, path] : files.path_of) {
    const bool is_known = catalog.tensors.count(tensor) != 0 || catalog.ties.count(tensor) != 0;
    if (is_known) continue;
    const std::string what = "not in " + path + ", where the index has it";
    catalog.unread.try_emplace(tensor, Unread{tensor, what, /*is_tensor=*/false});
  }
}

// All but folders of torch.distributed.checkpoint.
absl::StatusOr<Catalog> catalog_of_weights(const std::string& path) {
  Catalog catalog;
  const auto files = files_at(path, catalog);
  if (!files.ok()) return files.status();
  for (const auto& each : files->paths) {
    if (auto added = add_file(catalog, each, *files); !added.ok()) return added;
  }
  leave_out_ambiguous(catalog);
  // Metadata is ties only where it names a tensor.
  std::erase_if(catalog.ties,
                [&](const auto& tie) { return catalog.tensors.count(tie.second) == 0; });
  tell_absent(catalog, *files);
  return catalog;
}

}  // namespace

absl::StatusOr<Catalog> catalog_of_files(const std::string& path) {
  try {
    return is_dcp_folder(path) ? catalog_of_dcp_folder(path) : catalog_of_weights(path);
  } catch (const std::exception& error) {
    return absl::DataLossError(path + ": " + plain_text_of(error));
  }
}

}  // namespace fsdp::internal::checkpoint
