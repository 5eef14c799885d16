#include "tests/fully_shard/random_programs/custom_calls.h"

#include "fully_shard/custom_collectives.h"

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <utility>

namespace fsdp::testing {
namespace {

Communicate counted(const std::shared_ptr<int64_t>& calls, Communicate other) {
  return [calls, other = std::move(other)](const at::Tensor& output, const at::Tensor& input) {
    ++*calls;
    return other(output, input);
  };
}

}  // namespace

void CustomCalls::count_gathers(FSDPModule& unit, const DeviceMesh& mesh) {
  gathers_ = std::make_shared<int64_t>();
  unit.set_custom_all_gather(counted(gathers_, all_gather_over(mesh)));
}

void CustomCalls::count_reductions(FSDPModule& unit, const DeviceMesh& mesh) {
  reductions_ = std::make_shared<int64_t>();
  unit.set_custom_reduce_scatter(counted(reductions_, reduce_scatter_over(mesh)));
}

}  // namespace fsdp::testing
