#include "fully_shard/units/shard_placement.h"

#include <c10/util/Exception.h>

#include <map>
#include <memory>
#include <optional>
#include <utility>

namespace fsdp::internal {

void place_parameters(ManagedModules& managed, const DeviceMesh& mesh,
                      const FullyShardOptions& options) {
  if (!options.shard_placement_fn) return;
  for (auto& param : managed.params) {
    if (param.is_tied_to_a_unit()) continue;
    const auto placement = options.shard_placement_fn(param.path, param.tensor);
    if (!placement) continue;
    const auto ndim = param.tensor.dim();
    const auto dim = placement->dim < 0 ? placement->dim + ndim : placement->dim;
    TORCH_CHECK_VALUE(dim >= 0 && dim < ndim, "fully_shard: shard_placement_fn gave Shard(",
                      placement->dim, ") for parameter '", param.path, "' of ", ndim,
                      " dimensions (rank ", mesh.rank(), ")");
    TORCH_CHECK_NOT_IMPLEMENTED(
        !Placement(*placement).is_interleaved(), "fully_shard: shard_placement_fn gave ",
        *placement, " for parameter '", param.path,
        "'; allowed are cuts without outer and unit (rank ", mesh.rank(), ")");
    param.sharded_dim = dim;
  }
}

ShardPlacementFn asking_once(ShardPlacementFn function) {
  if (!function) return {};
  using Answers = std::map<const c10::TensorImpl*, std::optional<Shard>>;
  auto answers = std::make_shared<Answers>();
  return [function = std::move(function), answers = std::move(answers)](const std::string& fqn,
                                                                        const at::Tensor& tensor) {
    const auto known = answers->find(tensor.unsafeGetTensorImpl());
    if (known != answers->end()) return known->second;
    return (*answers)[tensor.unsafeGetTensorImpl()] = function(fqn, tensor);
  };
}

}  // namespace fsdp::internal
