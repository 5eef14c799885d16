#include "dtensor/internal/whole_dims.h"

#include <c10/util/Exception.h>

namespace fsdp::internal {

void check_whole_dims(const OperatorCall& call, const DTensorSpec& spec,
                      const std::vector<int64_t>& dims) {
  for (int64_t dim : dims) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !spec.is_cut(dim), call.description(), ": dimension ", dim, ", along which it ",
        "works, is cut across ranks. Call .redistribute({Replicate()}) or .full_tensor() first "
        "(collective).");
  }
}

}  // namespace fsdp::internal
