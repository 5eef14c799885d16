#include "checkpoint/checkpoint.h"
#include "checkpoint/files/checksums.h"
#include "checkpoint/files/raise.h"
#include "checkpoint/format/catalog/catalog.h"
#include "checkpoint/io/commit.h"
#include "checkpoint/io/verified_file.h"

#include <c10/util/Exception.h>

#include <map>

namespace fsdp {
namespace {

using namespace internal::checkpoint;  // NOLINT: this file is their front

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
