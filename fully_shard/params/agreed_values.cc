#define XXH_INLINE_ALL
#include "fully_shard/params/agreed_values.h"

#include "device_mesh/device_mesh.h"
#include "device_mesh/on_mesh/mesh_collectives.h"
#include "fully_shard/transport/mesh_dims.h"

#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>

namespace fsdp::internal {
namespace {

constexpr size_t kWords = 5;  // per parameter, as Hashes has them

uint64_t mix(uint64_t seed, uint64_t value) {
  return XXH3_64bits_withSeed(&value, sizeof value, seed);
}

const char* what_differs(size_t word) {
  switch (word) {
    case 0:
      return "has another name, shape, dtype or sharded dimension, or another place among the "
             "unit's parameters";
    case 1:
      return "started with other values; give every rank the same seed, load the same weights, or "
             "call fsdp::broadcast_states(model, mesh) before fully_shard";
    case 2:
      return "was written with other values (a reset with a rank's own seed, Embedding's max_norm "
             "with a rank's own rows): writes to sharded parameters must be the same on every rank";
    case 3:
      return "was given other values (copy_, set_data or torch::load of a plain tensor, of which "
             "each rank keeps its part): copy the same values on every rank, or write this rank's "
             "part alone (to_local(), then fsdp::mark_shard_written)";
    default:
      return "was written with other tensors without dimensions (a learning rate, a factor that a "
             "rank computed from its own data): every rank must write with the same, such as "
             "fsdp::all_reduce(loss, mesh) gives";
  }
}

bool may_be_unnoted(size_t word) { return word == 1 || word >= 3; }

// Two ranks, by their places, of which the second one says something else.
struct RanksThatDiffer {
  int64_t first, other;
};

// `said`: a word of each rank.
std::optional<RanksThatDiffer> ranks_that_differ(const std::vector<uint64_t>& said,
                                                 bool may_be_silent) {
  std::optional<size_t> first;
  for (size_t rank = 0; rank < said.size(); ++rank) {
    if (may_be_silent && said[rank] == 0) continue;
    if (!first) first = rank;
    if (said[rank] != said[*first])
      return RanksThatDiffer{static_cast<int64_t>(*first), static_cast<int64_t>(rank)};
  }
  return std::nullopt;
}

// `ranks`: what they are called.
std::string in_words(const std::string& ranks, const RanksThatDiffer& found,
                     const std::string& parameter, size_t word) {
  return "parameter '" + parameter + "' of " + ranks + std::to_string(found.other) + " " +
         what_differs(word) + ". It differs from " + ranks + std::to_string(found.first) + "'s";
}

}  // namespace

void AgreedValues::note_start(size_t param, const std::string& name, const at::Tensor& whole,
                              const Shard& cut) {
  auto& hashes = params_[param];
  hashes.start_geometry = XXH3_64bits(name.data(), name.size());
  for (const auto size : whole.sizes()) {
    hashes.start_geometry = mix(hashes.start_geometry, static_cast<uint64_t>(size));
  }
  hashes.start_geometry = mix(hashes.start_geometry, static_cast<uint64_t>(whole.scalar_type()));
  hashes.start_geometry = mix(hashes.start_geometry, Placement(cut).hash());
  if (whole.is_cpu()) hashes.start_values = XXH3_64bits(whole.const_data_ptr(), whole.nbytes());
}

void AgreedValues::note_member_write(size_t param, const void* bytes, int64_t nbytes,
                                     c10::Device device) {
  if (!device.is_cpu()) return;  // hashing there would stall the host
  auto& hash = params_[param].member_write;
  hash = mix(hash, XXH3_64bits(bytes, static_cast<size_t>(nbytes)));
}

void AgreedValues::note_factors(size_t param, uint64_t hash) {
  auto& factors = params_[param].factors;
  factors = std::max<uint64_t>(mix(factors, hash), 1);  // 0: not noted
}

uint64_t AgreedValues::word() const {
  uint64_t word = 0;
  for (size_t param = 0; param < params_.size(); ++param) {
    const auto& [geometry, values, write, copied, factors] = params_[param];
    const std::array all = {geometry, values, write, copied, factors};
    static_assert(all.size() == kWords);
    if (std::all_of(all.begin(), all.end(), [](uint64_t hash) { return hash == 0; })) continue;
    word = mix(word, param);
    for (const uint64_t hash : all) word = mix(word, hash);
  }
  return word;
}

bool AgreedValues::is_of_all_ranks() const {
  return std::any_of(params_.begin(), params_.end(), [](const Hashes& hashes) {
    return hashes.start_geometry != 0 || hashes.member_write != 0;
  });
}

void AgreedValues::agreed() { params_.assign(params_.size(), Hashes{}); }

std::vector<uint64_t> AgreedValues::table() const {
  static_assert(sizeof(Hashes) == kWords * sizeof(uint64_t));
  std::vector<uint64_t> words(params_.size() * kWords);
  std::memcpy(words.data(), params_.data(), params_.size() * sizeof(Hashes));
  return words;
}

std::string AgreedValues::difference_from(const std::vector<std::vector<uint64_t>>& tables,
                                          const std::vector<std::string>& names) const {
  const auto own = table();
  for (size_t word = 0; word < own.size(); ++word) {
    std::vector<uint64_t> said;
    for (const auto& table : tables) said.push_back(table.empty() ? own[word] : table[word]);
    if (const auto found = ranks_that_differ(said, /*may_be_silent=*/true))
      return in_words("shard rank ", *found, names[word / kWords], word % kWords);
  }
  return "";
}

std::string AgreedValues::difference(const DeviceMesh& mesh, int64_t dim,
                                     const std::vector<std::string>& names) {
  const std::string ranks = dim == shard_mesh_dim(mesh) ? "shard rank " : "replica ";
  const auto own = table();
  std::vector<int64_t> words(own.begin(), own.end());
  const at::Tensor of_all = agree({collectives_of(mesh, dim)},
                                  {.words = words, .what = "agreement of the parameters' hashes"})
                                .words;
  const auto* const all = of_all.const_data_ptr<int64_t>();
  for (size_t word = 0; word < words.size(); ++word) {
    std::vector<uint64_t> said;
    for (size_t rank = 0; rank < static_cast<size_t>(of_all.size(0)); ++rank)
      said.push_back(static_cast<uint64_t>(all[rank * words.size() + word]));
    const size_t what = word % kWords;
    if (const auto found = ranks_that_differ(said, may_be_unnoted(what)))
      return in_words(ranks, *found, names[word / kWords], what);
    words[word] = static_cast<int64_t>(*std::max_element(said.begin(), said.end()));
  }
  std::memcpy(static_cast<void*>(params_.data()), words.data(), params_.size() * sizeof(Hashes));
  return "";
}

}  // namespace fsdp::internal
