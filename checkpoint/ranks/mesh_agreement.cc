#include "checkpoint/ranks/mesh_agreement.h"

#include "checkpoint/format/strict_json.h"
#include "dtensor/dtensor.h"
#include "dtensor/tensor/dtensor_impl.h"

#include <algorithm>

namespace fsdp::internal::checkpoint {
namespace {

// Messages may quote names of any bytes, so they travel as binary JSON.
std::string packed_failures(const Failures& failures) {
  if (failures.empty()) return {};
  Json json = Json::array();
  for (const auto& [rank, failure] : failures) {
    json.push_back({rank, failure.is_value_error, failure.text});
  }
  const auto bytes = Json::to_cbor(json);
  return std::string(bytes.begin(), bytes.end());
}

void add_failures(Failures& failures, const std::string& text) {
  if (text.empty()) return;
  for (const Json& each : Json::from_cbor(text)) {
    failures[each.at(0).get<int64_t>()] = {each.at(1).get<bool>(), each.at(2).get<std::string>()};
  }
}

// REQUIRES: at least one mesh. Collective over each, in order.
void agree_over(const std::vector<DeviceMesh>& meshes, const Failure& mine,
                const std::string& what) {
  Failures failures;
  if (!mine.text.empty()) failures[meshes.front().rank()] = mine;
  for (const DeviceMesh& mesh : meshes) {
    const std::string known = packed_failures(failures);
    for (const auto& text : exchange(mesh, known, what)) add_failures(failures, text);
  }
  throw_any(failures, /*is_alone=*/false, what);
}

}  // namespace

std::vector<DeviceMesh> meshes_of(const std::vector<at::Tensor>& tensors) {
  std::vector<DeviceMesh> meshes;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined() || !is_dtensor(tensor)) continue;
    const DeviceMesh& mesh = spec_of(tensor).mesh();
    const bool is_known = std::find(meshes.begin(), meshes.end(), mesh) != meshes.end();
    if (mesh.size() > 1 && !is_known) meshes.push_back(mesh);
  }
  return meshes;
}

void attempt_with_all(const std::vector<DeviceMesh>& meshes, const std::function<void()>& step,
                      const std::string& what) {
  if (meshes.empty()) return step();
  agree_over(meshes, attempt(step), what);
}

}  // namespace fsdp::internal::checkpoint
