#define XXH_INLINE_ALL
#include "tensor_parallel/internal/agreement.h"

#include "device_mesh/collectives/collectives.h"
#include "device_mesh/collectives/issue_log.h"
#include "on_demand/deferred/deferred_storage.h"
#include "on_demand/deferred/fingerprint.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>
#include <xxhash.h>

#include <algorithm>
#include <string>

namespace fsdp::internal {
namespace {

uint64_t hash_of(const std::string& text, uint64_t seed) {
  return XXH3_64bits_withSeed(text.data(), text.size(), seed);
}

// Of what will be computed, where there are no values yet.
uint64_t hash_of_values(const at::Tensor& member, uint64_t seed) {
  if (DeferredStorage::of(member) != nullptr) return seed ^ fingerprint_of(member);
  if (member.is_meta() || member.numel() == 0) return seed;
  const at::Tensor values = member.detach().cpu();
  return XXH3_64bits_withSeed(values.const_data_ptr(), values.nbytes(), seed);
}

int64_t hash_of(const PlannedParameter& parameter) {
  uint64_t hash = hash_of(parameter.path, 0);
  hash = hash_of(to_string(parameter.spec), hash);
  hash ^= static_cast<uint64_t>(parameter.member.scalar_type());
  return static_cast<int64_t>(hash_of_values(parameter.member, hash));
}

at::Tensor gathered(const std::vector<int64_t>& words, const DeviceMesh& mesh) {
  const auto on_device = c10::TensorOptions(c10::kLong).device(local_device(mesh));
  at::Tensor own = at::tensor(words, c10::kLong).to(on_device.device());
  const auto count = static_cast<int64_t>(words.size());
  at::Tensor all = at::empty({mesh.size() * count}, on_device);
  IssueLog::of(mesh, 0)->run({.kind = CollectiveKind::kAllGather,
                              .what = "agreement of parallelize_module",
                              .bytes = static_cast<int64_t>(own.nbytes())},
                             [&] { return all_gather(mesh.group(), all, own); });
  return all.cpu().view({mesh.size(), count});
}

}  // namespace

void check_agreement(const std::vector<PlannedParameter>& parameters, const DeviceMesh& mesh) {
  const auto counts = gathered({static_cast<int64_t>(parameters.size())}, mesh);
  for (int64_t r = 1; r < mesh.size(); ++r) {
    TORCH_CHECK_VALUE(counts[r].equal(counts[0]), "parallelize_module: the plan means ",
                      counts[0].item<int64_t>(), " parameters on coordinate 0 of ", mesh, " and ",
                      counts[r].item<int64_t>(), " on coordinate ", r, " (all ranks see this)");
  }
  std::vector<int64_t> words;
  for (const auto& parameter : parameters) words.push_back(hash_of(parameter));
  const at::Tensor all = gathered(words, mesh);
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto column = all.select(1, static_cast<int64_t>(i));
    for (int64_t r = 1; r < mesh.size(); ++r) {
      TORCH_CHECK_VALUE(column[r].equal(column[0]), "parallelize_module: parameter '",
                        parameters[i].path, "' differs between coordinates 0 and ", r, " of ", mesh,
                        ": its name, shape, dtype, cut or values; give every rank the same seed, "
                        "or load the same weights (all ranks see this)");
    }
  }
}

}  // namespace fsdp::internal
