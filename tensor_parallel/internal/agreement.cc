#define XXH_INLINE_ALL
#include "tensor_parallel/internal/agreement.h"

#include "deferred_init/deferred_storage.h"
#include "deferred_init/fingerprint.h"
#include "device_mesh/collectives/group.h"
#include "device_mesh/collectives/issue_log.h"
#include "device_mesh/on_mesh/mesh_collectives.h"
#include "dtensor/tensor/value_hash.h"

#include <c10/util/Exception.h>
#include <xxhash.h>

#include <algorithm>
#include <string>
#include <utility>

namespace fsdp::internal {
namespace {

constexpr const char* kAgreement = "agreement of parallelize_module";

uint64_t hash_of(const std::string& text, uint64_t seed) {
  return XXH3_64bits_withSeed(text.data(), text.size(), seed);
}

// Of what will be computed, where there are no values yet.
uint64_t hash_of_member(const at::Tensor& member, uint64_t seed) {
  if (DeferredStorage::of(member) != nullptr) return seed ^ fingerprint_of(member);
  return member.is_meta() ? seed : hash_of_values(member, seed);
}

int64_t hash_of(const PlannedParameter& parameter) {
  uint64_t hash = hash_of(parameter.path, 0);
  hash = hash_of(to_string(parameter.spec), hash);
  hash ^= static_cast<uint64_t>(parameter.member.scalar_type());
  return static_cast<int64_t>(hash_of_member(parameter.member, hash));
}

// That of the last one on the mesh, which no other has; 0 where there is one rank.
uint32_t sequence_of_agreement(const DeviceMesh& mesh) {
  const auto issued = collectives_of(mesh, 0).log()->recent_operations();
  const auto last = std::find_if(issued.rbegin(), issued.rend(), [](const auto& operation) {
    return operation.what == kAgreement;
  });
  return last == issued.rend() ? 0 : last->sequence;
}

}  // namespace

uint32_t check_agreement(const std::vector<PlannedParameter>& parameters, const DeviceMesh& mesh) {
  // The ranks of a fake world have what this one has.
  if (group_backend(mesh.group()) == "fake") return 0;
  const auto of_all = [&](std::vector<int64_t> words) {
    return agree(collectives_of(mesh),
                 {.words = std::move(words), .what = kAgreement, .device = local_device(mesh)});
  };
  const auto counts = of_all({static_cast<int64_t>(parameters.size())});
  if (const auto found = counts.difference) {
    TORCH_CHECK_VALUE(false, "parallelize_module: the plan means ", counts.words[0].item<int64_t>(),
                      " parameters on coordinate 0 of ", mesh, " and ",
                      counts.words[found->rank].item<int64_t>(), " on coordinate ", found->rank,
                      " (all ranks see this)");
  }
  std::vector<int64_t> words;
  for (const auto& parameter : parameters) words.push_back(hash_of(parameter));
  if (const auto found = of_all(std::move(words)).difference) {
    TORCH_CHECK_VALUE(false, "parallelize_module: parameter '", parameters[found->word].path,
                      "' differs between coordinates 0 and ", found->rank, " of ", mesh,
                      ": its name, shape, dtype, cut or values; give every rank the same seed, "
                      "or load the same weights (all ranks see this)");
  }
  return sequence_of_agreement(mesh);
}

}  // namespace fsdp::internal
