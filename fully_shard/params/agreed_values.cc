#define XXH_INLINE_ALL
#include "fully_shard/params/agreed_values.h"

#include "device_mesh/device_mesh.h"
#include "device_mesh/on_mesh/collectives_of.h"
#include "fully_shard/transport/mesh_dims.h"

#include <c10/util/Exception.h>
#include <xxhash.h>

#include <cstring>
#include <utility>

namespace fsdp::internal {
namespace {

constexpr size_t kWords = 3;  // per parameter, as Hashes has them

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
    default:
      return "was written with other values (a reset with a rank's own seed, Embedding's max_norm "
             "with a rank's own rows): writes to sharded parameters must be the same on every rank";
  }
}

}  // namespace

void AgreedValues::note_start(size_t param, const std::string& name, const at::Tensor& whole,
                              int64_t sharded_dim) {
  auto& hashes = params_[param];
  hashes.start_geometry = XXH3_64bits(name.data(), name.size());
  for (const auto size : whole.sizes()) {
    hashes.start_geometry = mix(hashes.start_geometry, static_cast<uint64_t>(size));
  }
  hashes.start_geometry = mix(hashes.start_geometry, static_cast<uint64_t>(whole.scalar_type()));
  hashes.start_geometry = mix(hashes.start_geometry, static_cast<uint64_t>(sharded_dim));
  if (whole.is_cpu()) hashes.start_values = XXH3_64bits(whole.const_data_ptr(), whole.nbytes());
}

void AgreedValues::note_member_write(size_t param, const void* bytes, int64_t nbytes,
                                     c10::Device device) {
  if (!device.is_cpu()) return;  // hashing there would stall the host
  auto& hash = params_[param].member_write;
  hash = mix(hash, XXH3_64bits(bytes, static_cast<size_t>(nbytes)));
}

uint64_t AgreedValues::word() const {
  uint64_t word = 0;
  for (size_t param = 0; param < params_.size(); ++param) {
    const auto& [geometry, values, write] = params_[param];
    if (geometry == 0 && values == 0 && write == 0) continue;
    word = mix(mix(mix(mix(word, param), geometry), values), write);
  }
  return word;
}

void AgreedValues::agreed() { params_.assign(params_.size(), Hashes{}); }

void AgreedValues::report(const DeviceMesh& mesh, int64_t dim,
                          const std::vector<std::string>& names) const {
  const char* ranks = dim == shard_dim_of(mesh) ? "shard rank " : "replica ";
  static_assert(sizeof(Hashes) == kWords * sizeof(int64_t));
  std::vector<int64_t> words(params_.size() * kWords);
  std::memcpy(words.data(), params_.data(), params_.size() * sizeof(Hashes));
  const auto found =
      agree({collectives_of(mesh, dim)},
            {.words = std::move(words), .what = "agreement of the parameters' hashes"})
          .difference;
  TORCH_INTERNAL_ASSERT(found, "ranks' agreement words differ, but no hash does");
  TORCH_CHECK_VALUE(false, "parameter '", names[found->word / kWords], "' of ", ranks, found->rank,
                    " ", what_differs(found->word % kWords), ". It differs from ", ranks,
                    "0's; every rank gets this error (rank ", mesh.rank(), ")");
}

}  // namespace fsdp::internal
