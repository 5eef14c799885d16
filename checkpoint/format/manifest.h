// checkpoint.json: what a checkpoint holds and where. Written last, and with the rename
// what makes a folder a checkpoint. Grows with tensors plus ranks, not their product.
#pragma once

#include "checkpoint/format/json.h"
#include "checkpoint/format/saved_layout.h"

#include <absl/status/statusor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace fsdp::internal::checkpoint {

inline constexpr const char* kManifestName = "checkpoint.json";

struct FileRecord {
  int64_t rank = 0;
  int64_t bytes = 0;
  std::string checksum;  // XXH3-64 of the .xxh3 file beside it
};

struct TensorRecord {
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::vector<int64_t> shape;
  int64_t layout = -1;  // index; -1: whole, in `file`
  int64_t replica = 0;  // the copy that was written
  std::string file;
  std::string codec;  // what the codes are called where it holds some; else empty
};

struct ItemRecord {
  std::string kind;  // "model", "optimizer" or "tensors"
  std::map<std::string, TensorRecord> tensors;
  std::map<std::string, std::string> ties;  // a name without a tensor of its own -> whose it has
  Json details = Json::object();            // of an optimizer: scalars and groups
};

std::string new_save_id();  // 16 random hexadecimal digits
int64_t now_ns();           // since 1970

struct Manifest {
  std::string save_id;  // tells this save from others: of new_save_id()
  int64_t step = -1;
  int64_t saved_at = 0;  // by now_ns()
  int64_t world_size = 1;
  std::map<std::string, FileRecord> files;  // by path below the checkpoint
  std::vector<SavedLayout> layouts;
  std::map<std::string, ItemRecord> items;  // by the folder they lie in
  Json values = Json::object();
  Json scheduler;
  std::vector<std::string> per_rank;
};

// The file of `rank` in item `item` that has box `number` of tensors: all but those cut
// in blocks have only box 0 there.
std::string shard_path(const std::string& item, int64_t rank, int64_t number);
std::string rank_path(int64_t rank);  // of its per-rank items

std::string format_manifest(const Manifest& manifest);
absl::StatusOr<Manifest> parse_manifest(const std::string& text, const std::string& path);

// The manifest of a whole checkpoint: it parses, and every file it lists is there with
// its size. kNotFound where there is none.
absl::StatusOr<Manifest> read_manifest(const std::string& folder);

}  // namespace fsdp::internal::checkpoint
