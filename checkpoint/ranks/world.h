// The ranks that save or load together, the short texts they tell each other, and how a
// call goes on or ends on all of them alike: where it cannot be done on one, none changes
// anything, and where it fails later all say that something has changed.
//
//   World world = default_world();                          // who saves and loads
//   agree(world, attempt([&] { plan(); }), said, "save");   // all, or all throw
//
// A call that sets what is distributed goes on or ends on all ranks of its meshes:
//
//   attempt_with_all(meshes, [&] { plan(); }, "set_model_state_dict");
//   attempt_with_all(meshes, [&] { write(); }, "set_model_state_dict: partly overwritten");
#pragma once

#include "device_mesh/collectives/collectives.h"
#include "device_mesh/device_mesh.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::internal::checkpoint {

struct World {
  std::shared_ptr<const Group> group;  // null: a world of one
  int64_t rank = 0;
  int64_t size = 1;

  // For tensors of that device type. REQUIRES: a group.
  Collectives collectives(c10::DeviceType device_type = c10::kCPU) const {
    return Collectives::of(*group, device_type);
  }
};
// The default process group's, or a world of one where there is none.
World default_world();

// Everyone's text, by rank. One all-gather for texts up to 1016 bytes, else two.
// Collective over the world.
std::vector<std::string> exchange(const World& world, const std::string& mine,
                                  const std::string& what);
// The same of the ranks of `mesh`, in its order: all-gathers along each of its
// dimensions. Collective over the mesh.
std::vector<std::string> exchange(const DeviceMesh& mesh, const std::string& mine,
                                  const std::string& what);

// What went wrong on this rank, to be told to the others.
struct Failure {
  bool is_value_error = false;
  std::string text;  // empty: nothing
};
Failure attempt(const std::function<void()>& work);

using Failures = std::map<int64_t, Failure>;  // by rank
// Throws where there are any, with every text behind `what`: ValueError if all are.
// `is_alone`: of the one rank that there is. Local.
void throw_any(const Failures& failures, bool is_alone, const std::string& what);

// Returns what each rank said, or throws on all ranks alike when any rank failed, with
// every failed rank's text behind `what`. Collective over the world.
std::vector<std::string> agree(const World& world, const Failure& mine, const std::string& said,
                               const std::string& what);

// The meshes of more than one rank on which those of `tensors` lie that are DTensors,
// each once, in the order of the tensors. Local.
std::vector<DeviceMesh> meshes_of(const std::vector<at::Tensor>& tensors);

// Calls `step`. What it throws on one rank, every rank of `meshes` throws, with every
// failed rank's text behind `what`; a rank tells the later meshes what it learned over
// the earlier ones. Collective over each mesh, in order; without meshes local.
void attempt_with_all(const std::vector<DeviceMesh>& meshes, const std::function<void()>& step,
                      const std::string& what);

}  // namespace fsdp::internal::checkpoint
