#include "checkpoint/format/safetensors.h"

#include "checkpoint/files/errors.h"
#include "checkpoint/format/dtype.h"
#include "checkpoint/format/json.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <utility>

namespace fsdp::internal::checkpoint {
namespace {

constexpr const char* kMetadata = "__metadata__";
constexpr const char* kShardingInfo = "DCP_SHARDING_INFO";
constexpr uint64_t kLongestHeader = 100'000'000;
constexpr size_t kHeaderAlignment = 64;

// Where the first box of a tensor keeps its name, others of one file are name@1, ...
Json sharding_info(const std::vector<Entry>& entries) {
  Json info = Json::object();
  for (const Entry& entry : entries) {
    Json place = {{"saved_offsets", offsets_of(entry.box)}, {"global_shape", entry.global_shape}};
    if (entry.tensor != entry.name) place["logical_fqn"] = entry.tensor;
    info[entry.name] = std::move(place);
  }
  return info;
}

absl::Status broken(const std::string& path, const std::string& entry, const std::string& what) {
  return absl::DataLossError(path + ": entry '" + entry + "': " + what);
}

// The bits of an element; 0 for a dtype that is not known.
int64_t bits_of(const std::string& dtype) {
  if (const auto known = dtype_of(dtype)) return 8 * static_cast<int64_t>(c10::elementSize(*known));
  return bits_of_dtype_without_tensors(dtype).value_or(0);
}

// Of as many elements; nullopt where there is no such number.
std::optional<int64_t> bytes_of_elements(int64_t bits, const std::vector<int64_t>& shape) {
  const auto all = product_of(bits, shape);
  if (!all || *all % 8 != 0) return std::nullopt;
  return *all / 8;
}

void require_in_header(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error(what);
}

// Throws std::exception for another form.
absl::StatusOr<Entry> parse_entry(const std::string& name, const Json& json,
                                  const std::string& path) {
  const bool has_form = json.is_object() && json.contains("dtype") && json.contains("shape") &&
                        json.contains("data_offsets") && json.at("dtype").is_string();
  require_in_header(has_form, "it is not described by dtype, shape and data_offsets");
  Entry entry{.name = name, .tensor = name};
  const auto dtype = json.at("dtype").get<std::string>();
  const auto shape = integers_of(json.at("shape"));
  const auto place = integers_of(json.at("data_offsets"));
  const auto bytes = bytes_of_elements(bits_of(dtype), shape);
  if (!bytes) return broken(path, name, "impossible shape " + json.at("shape").dump());
  const bool is_known = bits_of(dtype) != 0;
  if (place.size() != 2 || place[0] < 0 || place[1] < place[0] ||
      (is_known && place[1] - place[0] != *bytes)) {
    return broken(path, name,
                  "data_offsets " + json.at("data_offsets").dump() + " do not hold " +
                      std::to_string(*bytes) + " bytes");
  }
  entry.begin = place[0], entry.end = place[1];
  entry.dtype = dtype_of(dtype).value_or(c10::ScalarType::Byte);
  entry.global_shape = dtype_of(dtype) ? shape : std::vector<int64_t>{place[1] - place[0]};
  entry.box = whole_box(entry.global_shape);
  if (!dtype_of(dtype)) {
    entry.unread = "a tensor of the dtype " + dtype + ", shape " + json.at("shape").dump() + ", " +
                   std::to_string(place[1] - place[0]) + " bytes";
  }
  return entry;
}

// Texts as they are, other values as JSON, which the format does not have but files do.
std::map<std::string, std::string> metadata_from(const Json& json) {
  std::map<std::string, std::string> metadata;
  if (!json.is_object()) return metadata;
  for (const auto& [key, value] : json.items()) {
    metadata[key] = value.is_string() ? value.get<std::string>() : value.dump();
  }
  return metadata;
}

// What the sharding information says of `entry`.
absl::Status place_entry(Entry& entry, const Json& json, const std::string& path) {
  require_in_header(json.is_object() && json.contains("saved_offsets"), "without saved_offsets");
  const auto offsets = integers_of(json.at("saved_offsets"));
  if (offsets.size() != entry.box.size()) return broken(path, entry.name, "bad saved_offsets");
  entry.knows_global_shape = json.contains("global_shape");
  if (entry.knows_global_shape) {
    entry.global_shape = integers_of(json.at("global_shape"));
    if (entry.global_shape.size() != offsets.size() || !can_be_shape(entry.global_shape)) {
      return broken(path, entry.name, "bad global_shape " + json.at("global_shape").dump());
    }
  }
  if (json.contains("logical_fqn")) {
    require_in_header(json.at("logical_fqn").is_string(), "its logical_fqn is no text");
    entry.tensor = json.at("logical_fqn").get<std::string>();
  }
  for (size_t dim = 0; dim < offsets.size(); ++dim) {
    Chunk& chunk = entry.box[dim];
    chunk.offset = offsets[dim];
    int64_t end = 0;
    if (chunk.offset < 0 || __builtin_add_overflow(chunk.offset, chunk.length, &end)) {
      return broken(path, entry.name, "bad saved_offsets");
    }
    if (!entry.knows_global_shape) entry.global_shape[dim] = end;
    if (chunk.offset > entry.global_shape[dim] - chunk.length) {
      return broken(path, entry.name, "lies outside of its tensor");
    }
  }
  return absl::OkStatus();
}

// What `work` returns, or the error that it throws, told of `entry`.
template <class Work>
auto told_of_entry(const std::string& path, const std::string& entry, const Work& work)
    -> decltype(work()) {
  try {
    return work();
  } catch (const std::exception& error) {
    return broken(path, entry, plain_text_of(error));
  }
}

absl::Status place_entries(Header& header, const std::string& path) {
  const auto found = header.metadata.find(kShardingInfo);
  if (found == header.metadata.end()) return absl::OkStatus();
  auto info = parse_json(found->second, path + ": " + kShardingInfo);
  if (!info.ok()) return info.status();
  for (Entry& entry : header.entries) {
    if (!entry.unread.empty() || !info->contains(entry.name)) continue;
    const auto placed = told_of_entry(
        path, entry.name, [&] { return place_entry(entry, info->at(entry.name), path); });
    if (!placed.ok()) return placed;
  }
  return absl::OkStatus();
}

absl::Status check_no_holes(std::vector<Entry>& entries, int64_t data_bytes,
                            const std::string& path) {
  std::stable_sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  int64_t expected = 0;
  for (const Entry& entry : entries) {
    if (entry.begin != expected) {
      return broken(path, entry.name,
                    "starts at byte " + std::to_string(entry.begin) + " of the data, not at " +
                        std::to_string(expected));
    }
    expected = entry.end;
  }
  if (expected == data_bytes) return absl::OkStatus();
  return absl::DataLossError(path + ": has " + std::to_string(data_bytes) +
                             " bytes of data, and its header speaks of " +
                             std::to_string(expected));
}

absl::StatusOr<Header> parse_header(std::string_view json, int64_t data_bytes,
                                    const std::string& path) {
  auto parsed = parse_json(json, path + ": header");
  if (!parsed.ok()) return parsed.status();
  if (!parsed->is_object()) {
    return absl::DataLossError(path + ": its header is no JSON object of tensors");
  }
  Header header;
  for (const auto& item : parsed->get_ref<const Json::object_t&>()) {
    const std::string& name = item.first;
    const Json& value = item.second;
    if (name == kMetadata) {
      header.metadata = metadata_from(value);
      continue;
    }
    auto entry = told_of_entry(path, name, [&] { return parse_entry(name, value, path); });
    if (!entry.ok()) return entry.status();
    header.entries.push_back(*std::move(entry));
  }
  if (auto whole = check_no_holes(header.entries, data_bytes, path); !whole.ok()) return whole;
  if (auto placed = place_entries(header, path); !placed.ok()) return placed;
  return header;
}

}  // namespace

int64_t bytes_of(const Entry& entry) {
  return numel_of(entry.box) * static_cast<int64_t>(c10::elementSize(entry.dtype));
}

int64_t lay_out(std::vector<Entry>& entries) {
  std::stable_sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return c10::elementSize(a.dtype) > c10::elementSize(b.dtype);
  });
  int64_t next = 0;
  for (Entry& entry : entries) {
    entry.begin = next;
    entry.end = next += bytes_of(entry);
  }
  return next;
}

std::string format_header(const std::vector<Entry>& entries,
                          std::map<std::string, std::string> metadata, bool sharded) {
  metadata["format"] = "pt";
  if (sharded) {
    metadata["DCP_VERSION"] = "1.0";
    metadata[kShardingInfo] = sharding_info(entries).dump();
  }
  Json json = Json::object();
  json[kMetadata] = metadata;
  for (const Entry& entry : entries) {
    json[entry.name] = {{"dtype", *dtype_name(entry.dtype)},
                        {"shape", lengths_of(entry.box)},
                        {"data_offsets", {entry.begin, entry.end}}};
  }
  std::string text = json.dump();
  text.append(
      (kHeaderAlignment - (sizeof(uint64_t) + text.size()) % kHeaderAlignment) % kHeaderAlignment,
      ' ');
  const uint64_t length = text.size();
  std::string head(sizeof(length), '\0');
  std::memcpy(head.data(), &length, sizeof(length));
  return head + text;
}

absl::StatusOr<Header> read_header(const InputFile& file) {
  uint64_t length = 0;
  if (file.bytes() < static_cast<int64_t>(sizeof(length))) {
    return absl::DataLossError(file.path() + ": too short for a safetensors file");
  }
  if (auto read = file.read_at(&length, sizeof(length), 0); !read.ok()) return read;
  const auto room = static_cast<uint64_t>(file.bytes()) - sizeof(length);
  if (length > kLongestHeader || length > room) {
    return absl::DataLossError(file.path() + ": not a safetensors file: a header of " +
                               std::to_string(length) + " bytes in a file of " +
                               std::to_string(file.bytes()));
  }
  std::string json(length, '\0');
  if (auto read = file.read_at(json.data(), static_cast<int64_t>(length), sizeof(length));
      !read.ok()) {
    return read;
  }
  auto header = parse_header(json, static_cast<int64_t>(room - length), file.path());
  if (header.ok()) header->data_begin = static_cast<int64_t>(sizeof(length) + length);
  return header;
}

}  // namespace fsdp::internal::checkpoint
