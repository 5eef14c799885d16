#include "tensor_parallel/internal/agreement.h"

#include "deferred_init/deferred_storage.h"
#include "deferred_init/fingerprint.h"
#include "device_mesh/collectives/group.h"
#include "device_mesh/collectives/issue_log.h"
#include "device_mesh/on_mesh/claims.h"
#include "device_mesh/on_mesh/mesh_collectives.h"
#include "dtensor/tensor/value_hash.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <string>
#include <utility>

namespace fsdp::internal {
namespace {

constexpr const char* kAgreement = "agreement of parallelize_module";  // what Claims sends

// Of what will be computed, where there are no values yet.
uint64_t hash_of_member(const at::Tensor& member, uint64_t seed) {
  if (DeferredStorage::of(member) != nullptr) return seed ^ fingerprint_of(member);
  return member.is_meta() ? seed : hash_of_values(member, seed);
}

// Name, dtype, cut and values of each; the hash of values is read once.
std::string text_of(const std::vector<PlannedParameter>& parameters) {
  std::string text;
  for (const auto& parameter : parameters)
    text += c10::str("parameter '", parameter.path, "', ", parameter.member.scalar_type(), " ",
                     to_string(parameter.spec), ", values of hash ",
                     hash_of_member(parameter.member, 0), "\n");
  return text;
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
  Claims claims("parallelize_module");
  claims.add("the parameters that the plan means", text_of(parameters));
  claims.check(mesh,
               "give every rank the same model, plan and seed, or load the same weights; nothing "
               "was changed");
  return sequence_of_agreement(mesh);
}

}  // namespace fsdp::internal
