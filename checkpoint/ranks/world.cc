#include "checkpoint/ranks/world.h"

#include "checkpoint/format/json.h"
#include "device_mesh/collectives/words_and_texts.h"
#include "device_mesh/on_mesh/mesh_collectives.h"
#include "device_mesh/process_group.h"
#include "dtensor/dtensor.h"
#include "dtensor/tensor/dtensor_impl.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <exception>

namespace fsdp::internal::checkpoint {
namespace {

// "save /a/path": paths may differ, which the texts tell; calls may not.
std::string call_of(const std::string& what) { return what.substr(0, what.find(' ')); }

}  // namespace

World default_world() {
  if (!is_process_group_initialized()) return {};
  World world{.group = std::make_shared<const Group>(default_process_group())};
  world.rank = group_rank(*world.group);
  world.size = group_size(*world.group);
  return world;
}

std::vector<std::string> exchange(const World& world, const std::string& mine,
                                  const std::string& what) {
  if (!world.group || world.size == 1) return {mine};
  return texts_of_all({world.collectives()}, {.text = mine, .what = what, .call = call_of(what)});
}

std::vector<std::string> exchange(const DeviceMesh& mesh, const std::string& mine,
                                  const std::string& what) {
  return texts_of_all(
      collectives_of(mesh),
      {.text = mine, .what = what, .call = call_of(what), .device = local_device(mesh)});
}

Failure attempt(const std::function<void()>& work) {
  try {
    work();
    return {};
  } catch (const c10::ValueError& error) {
    return {true, error.what_without_backtrace()};
  } catch (const c10::Error& error) {
    return {false, error.what_without_backtrace()};
  } catch (const std::exception& error) {
    return {false, error.what()};
  }
}

void throw_any(const Failures& failures, bool is_alone, const std::string& what) {
  std::string text;
  bool only_values = true;
  for (const auto& [rank, failure] : failures) {
    only_values &= failure.is_value_error;
    if (!text.empty()) text += "; ";
    if (!is_alone) text += "rank " + std::to_string(rank) + ": ";
    text += failure.text;
  }
  TORCH_CHECK_VALUE(failures.empty() || !only_values, what, ": ", text);
  TORCH_CHECK(failures.empty(), what, ": ", text);
}

std::vector<std::string> agree(const World& world, const Failure& mine, const std::string& said,
                               const std::string& what) {
  const bool failed = !mine.text.empty();
  const std::string text =
      failed ? std::string(mine.is_value_error ? "V" : "E") + mine.text : "O" + said;
  auto texts = exchange(world, text, what);
  Failures failures;
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    const char kind = texts[rank][0];
    texts[rank].erase(0, 1);
    if (kind != 'O') failures[static_cast<int64_t>(rank)] = {kind == 'V', texts[rank]};
  }
  throw_any(failures, world.size == 1, what);
  return texts;
}

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
