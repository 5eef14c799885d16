#include "checkpoint/format/catalog/catalog.h"

#include <utility>

namespace fsdp::internal::checkpoint {
namespace {

// The files of one item, numbered as they are first named.
class FileNumbers {
 public:
  FileNumbers(const std::string& folder, const Manifest& manifest, Catalog& catalog)
      : folder_(folder), manifest_(manifest), catalog_(catalog) {}

  absl::StatusOr<size_t> number_of(const std::string& name) {
    if (const auto known = numbers_.find(name); known != numbers_.end()) return known->second;
    const auto record = manifest_.files.find(name);
    if (record == manifest_.files.end()) {
      return absl::DataLossError(folder_ + ": the manifest does not list the file " + name);
    }
    catalog_.files.push_back({folder_ + "/" + name, record->second.bytes, record->second.checksum});
    return numbers_[name] = catalog_.files.size() - 1;
  }

 private:
  const std::string& folder_;
  const Manifest& manifest_;
  Catalog& catalog_;
  std::map<std::string, size_t> numbers_;
};

absl::StatusOr<StoredTensor> stored_tensor(const TensorRecord& record, const std::string& item,
                                           const Manifest& manifest, FileNumbers& numbers) {
  StoredTensor stored{.dtype = record.dtype, .shape = record.shape, .codec = record.codec};
  std::vector<std::pair<std::string, Box>> places;
  if (record.layout < 0) {
    places.emplace_back(record.file, whole_box(record.shape));
  } else {
    const SavedLayout& layout = manifest.layouts[static_cast<size_t>(record.layout)];
    for (auto& written : written_boxes(layout, record.shape, record.replica)) {
      places.emplace_back(shard_path(item, written.rank, written.number), std::move(written.box));
    }
  }
  for (auto& [name, box] : places) {
    auto number = numbers.number_of(name);
    if (!number.ok()) return number.status();
    stored.boxes.push_back({*number, std::move(box)});
  }
  return stored;
}

}  // namespace

absl::StatusOr<Catalog> catalog_of_item(const std::string& folder, const Manifest& manifest,
                                        const std::string& item) {
  Catalog catalog;
  const auto found = manifest.items.find(item);
  if (found == manifest.items.end()) {
    return absl::NotFoundError("the checkpoint has no '" + item + "'");
  }
  catalog.ties = found->second.ties;
  FileNumbers numbers(folder, manifest, catalog);
  for (const auto& [name, record] : found->second.tensors) {
    auto stored = stored_tensor(record, item, manifest, numbers);
    if (!stored.ok()) return stored.status();
    catalog.tensors.emplace(name, *std::move(stored));
  }
  return catalog;
}

void Catalog::leave_out(const std::string& name, const std::string& what) {
  tensors.erase(name);
  unread.try_emplace(name, Unread{name, what, /*is_tensor=*/true});
}

}  // namespace fsdp::internal::checkpoint
