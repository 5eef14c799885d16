#define XXH_INLINE_ALL
#include "device_mesh/on_mesh/claims.h"

#include "device_mesh/on_mesh/mesh_collectives.h"

#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <xxhash.h>

#include <array>
#include <charconv>
#include <map>
#include <optional>
#include <utility>

namespace fsdp::internal {
namespace {

constexpr int64_t kNone = 0, kRefusal = 1;  // topics

uint64_t hash_of(const std::string& text) { return XXH3_64bits(text.data(), text.size()); }

// Two ranks, by place, that differ in a topic; or one that refuses.
struct Difference {
  int64_t topic, first, other;
};

std::optional<Difference> first_difference(const at::Tensor& rows) {
  struct Said {
    int64_t place, hash;
  };
  std::map<int64_t, Said> first;  // by topic
  const auto* next = rows.const_data_ptr<int64_t>();
  for (int64_t place = 0; place < rows.size(0); ++place) {
    for (int64_t i = 0; i < Claims::kTopics; ++i, next += 2) {
      if (next[0] == kNone) continue;
      if (next[0] == kRefusal) return Difference{kRefusal, place, place};
      const auto& said = first.try_emplace(next[0], Said{place, next[1]}).first->second;
      if (said.hash != next[1]) return Difference{next[0], said.place, place};
    }
  }
  return std::nullopt;
}

}  // namespace

void Claims::add(std::string topic, uint64_t hash, std::function<std::string()> text) {
  const auto number = static_cast<int64_t>(hash_of(topic) | 2);  // neither kNone nor kRefusal
  claims_.push_back({std::move(topic), number, static_cast<int64_t>(hash), std::move(text)});
}

void Claims::add(std::string topic, const std::string& text) {
  add(std::move(topic), hash_of(text), [text] { return text; });
}

void Claims::add(std::string topic, double number) {
  std::array<char, 32> shortest;  // that reads as the same number
  const auto end = std::to_chars(shortest.begin(), shortest.end(), number + 0.0).ptr;  // no -0
  add(std::move(topic), std::string(shortest.begin(), end));
}

void Claims::refuse(std::string error) {
  claims_.push_back({"", kRefusal, 0, [error = std::move(error)] { return error; }});
}

at::Tensor Claims::words() const {
  auto words = at::zeros({kWords}, at::kLong);
  auto* next = words.mutable_data_ptr<int64_t>();
  const auto count = std::min(claims_.size(), static_cast<size_t>(kTopics));
  for (size_t i = 0; i < count; ++i) {
    *next++ = claims_[i].number;
    *next++ = claims_[i].hash;
  }
  return words;
}

// With the topic as the first line; empty where this rank has no such topic.
std::string Claims::text_of_topic(int64_t number) const {
  for (const auto& claim : claims_) {
    if (claim.number == number) return claim.topic + '\n' + claim.text();
  }
  return "";
}

void Claims::check_words(const at::Tensor& rows, const DeviceMesh& mesh,
                         const std::string& remedy) const {
  const auto found = first_difference(rows.contiguous());
  if (!found) return;
  const auto texts = texts_of_all(collectives_of(mesh), {.text = text_of_topic(found->topic),
                                                         .what = agreement(),
                                                         .call = agreement(),
                                                         .device = local_device(mesh)});
  const auto &first = texts[static_cast<size_t>(found->first)],
             &other = texts[static_cast<size_t>(found->other)];
  TORCH_CHECK_VALUE(found->topic != kRefusal, first.substr(1));
  const auto lines = different_lines(first, other);
  TORCH_CHECK_VALUE(false, call_, ": the ranks differ in ", first.substr(0, first.find('\n')),
                    ": rank ", mesh.ranks()[static_cast<size_t>(found->first)], " has ",
                    lines.first, " where rank ", mesh.ranks()[static_cast<size_t>(found->other)],
                    " has ", lines.other, "; ", remedy, " (rank ", mesh.rank(), ")");
}

void Claims::check(const DeviceMesh& mesh, const std::string& remedy) const {
  const auto what = agreement();
  const auto rows = rows_of_all(
      collectives_of(mesh), {.row = words().to(local_device(mesh)), .what = what, .call = what});
  check_words(rows.cpu(), mesh, remedy);
}

}  // namespace fsdp::internal
