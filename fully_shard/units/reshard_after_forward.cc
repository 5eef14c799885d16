#include "fully_shard/units/reshard_after_forward.h"

#include "fully_shard/transport/mesh_dims.h"

#include <c10/util/Exception.h>

#include <vector>

namespace fsdp::internal {
namespace {

std::vector<int64_t> divisors_of(int64_t number) {
  std::vector<int64_t> divisors;
  for (int64_t i = 1; i <= number; ++i) {
    if (number % i == 0) divisors.push_back(i);
  }
  return divisors;
}

}  // namespace

ResolvedReshardAfterForward resolve_reshard_after_forward(
    const char* caller, const std::optional<ReshardAfterForward>& asked, const DeviceMesh& mesh) {
  if (!asked) return {};
  const auto n = asked->world();
  if (!n) return {.reshards = asked->reshards()};
  const auto shards = mesh.size(shard_mesh_dim(mesh));
  TORCH_CHECK_VALUE(*n >= 1 && *n <= shards && shards % *n == 0, caller,
                    ": ReshardAfterForward::to_world(", *n, ") on ", shards,
                    " ranks that shard; allowed are ", c10::IntArrayRef(divisors_of(shards)),
                    " (rank ", mesh.rank(), ")");
  if (*n == 1) {
    TORCH_WARN_ONCE(caller,
                    ": ReshardAfterForward::to_world(1) keeps the parameters unsharded, as "
                    "false does; true frees them");
    return {.reshards = false};
  }
  if (*n == shards) return {.reshards = true};
  return {.reshards = true, .neighbours = n};
}

}  // namespace fsdp::internal
