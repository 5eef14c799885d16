#include "fully_shard/custom_collectives.h"

#include "device_mesh/collectives/inside_announced.h"
#include "fully_shard/transport/comm_context.h"

#include <ATen/ops/empty_like.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <string>

// What these send is not announced: the unit whose collective they stand for has
// announced it (device_mesh/collectives/inside_announced.h).

namespace fsdp {
namespace {

using internal::Group;

Group group_for(const DeviceMesh& mesh, const std::string& purpose) {
  return mesh.side_group(internal::shard_mesh_dim(mesh), purpose);
}

}  // namespace

Communicate all_gather_over(const DeviceMesh& mesh) {
  return [group = group_for(mesh, "custom all-gather")](const at::Tensor& output,
                                                        const at::Tensor& input) {
    return internal::all_gather_inside(group, output, input);
  };
}

Communicate reduce_scatter_over(const DeviceMesh& mesh) {
  return [group = group_for(mesh, "custom reduce-scatter")](const at::Tensor& output,
                                                            const at::Tensor& input) {
    return internal::reduce_scatter_inside(group, output, input);
  };
}

Communicate compressed_reduce_scatter(const DeviceMesh& mesh, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(dtype == at::kHalf || dtype == at::kBFloat16,
                    "compressed_reduce_scatter: dtype is ", dtype,
                    "; allowed: Half, BFloat16 (rank ", mesh.rank(), ")");
  return [group = group_for(mesh, "custom reduce-scatter"), dtype](const at::Tensor& output,
                                                                   const at::Tensor& input) {
    const auto narrow = input.to(dtype);
    if (narrow.is_same(input)) return internal::reduce_scatter_inside(group, output, input);
    const auto sum = at::empty_like(output, output.options().dtype(dtype));
    return internal::reduce_scatter_inside(group, sum, narrow,
                                           [output, sum, narrow] { output.copy_(sum); });
  };
}

}  // namespace fsdp
