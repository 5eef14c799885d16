#include "fully_shard/transport/transport.h"

#include "fully_shard/transport/c10d_transport.h"

#include <string>

namespace fsdp::internal {

std::string in_words(const Issue& issue) {
  const auto name = "unit '" + issue.unit_name + "'";
  if (issue.unit_name != kRootName) return name;
  return name + " (number " + std::to_string(issue.unit) + ")";
}

std::unique_ptr<Transport> make_transport(const DeviceMesh& mesh, int64_t dim) {
  return make_c10d_transport(mesh, dim);
}

}  // namespace fsdp::internal
