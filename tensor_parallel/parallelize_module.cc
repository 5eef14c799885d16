#include "tensor_parallel/parallelize_module.h"

#include "deferred_init/deferred_storage.h"
#include "device_mesh/collectives/group.h"
#include "device_mesh/collectives/issue_log.h"
#include "device_mesh/device_mesh.h"
#include "device_mesh/module_ref.h"
#include "device_mesh/on_mesh/claims.h"
#include "device_mesh/on_mesh/mesh_collectives.h"
#include "dtensor/random/thread_generators.h"
#include "dtensor/tensor/value_hash.h"
#include "tensor_parallel/internal/parallel_member.h"
#include "tensor_parallel/internal/planned_parameters.h"

#include <ATen/Context.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

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

// Whether all ranks hold the same whole parameters before each keeps its part. Throws the
// same ValueError on every rank where names, shapes, dtypes, placements or
// values differ. Else a number that tells these parameters from those of other models on
// the mesh, the same on every rank. Reads all values. Collective over the mesh.
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

int64_t number_of_this_process() {
  static const int64_t number = [] {
    std::random_device random;
    return static_cast<int64_t>(random()) << 32 | random();
  }();
  return number;
}

// Which generator it is: ranks that are threads of one process share one per device.
at::Tensor identity_of(c10::Device device) {
  const std::vector<int64_t> words = {number_of_this_process(), device.index()};
  return at::tensor(words, c10::kLong).view(c10::kByte);
}

at::Tensor from_first(const at::Tensor& own, const DeviceMesh& mesh) {
  const at::Tensor bytes = own.to(local_device(mesh), own.scalar_type(), false, /*copy=*/true);
  collectives_of(mesh, 0).broadcast(
      {.tensor = bytes, .what = "random state of parallelize_module"});
  return bytes.cpu();
}

// The random numbers of ranks that compute one model must be the same ones. Gives
// LibTorch's default generator of the mesh's device the state that it has on
// coordinate 0, on every rank that does not share that generator. Collective over the
// mesh.
void bring_generators_in_step(const DeviceMesh& mesh) {
  if (mesh.size() == 1) return;
  const c10::Device device = local_device(mesh);
  const at::Generator generator = at::globalContext().defaultGenerator(device);
  const at::Tensor identity = identity_of(device);
  const int64_t length = identity.numel();
  const at::Tensor first = from_first(at::cat({identity, generator_state(generator)}), mesh);
  if (first.narrow(0, 0, length).equal(identity)) return;
  set_generator_state(generator, first.narrow(0, length, first.numel() - length).clone());
}

}  // namespace
}  // namespace fsdp::internal

namespace fsdp {

void parallelize_module(ModuleRef module, const DeviceMesh& mesh, const ParallelPlan& plan) {
  auto& root = internal::given_module("parallelize_module", module);
  TORCH_CHECK_VALUE(mesh.ndim() == 1, "parallelize_module: mesh has ", mesh.ndim(),
                    " dimensions; pass a slice of one, such as mesh[\"tp\"] (rank ", mesh.rank(),
                    ")");
  const auto parameters = internal::planned_parameters(root, mesh, plan);
  const auto number = internal::check_agreement(parameters, mesh);
  internal::bring_generators_in_step(mesh);
  const auto steps = std::make_shared<internal::FirstSteps>();
  // Experts are given other tokens on each rank: there is nothing to compare.
  if (std::all_of(parameters.begin(), parameters.end(),
                  [](const auto& parameter) { return parameter.uses.is_own; }))
    steps->pass();
  for (const auto& parameter : parameters) internal::make_parallel_member(parameter, number, steps);
}

}  // namespace fsdp
