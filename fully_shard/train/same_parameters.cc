#include "fully_shard/train/same_parameters.h"

#include "device_mesh/on_mesh/mesh_collectives.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "fully_shard/params/registry_entry.h"

#include <c10/util/Exception.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <map>
#include <utility>

namespace fsdp::internal {
namespace {

double exact(uint64_t hash) {
  constexpr uint64_t kExact = (uint64_t{1} << 52) - 1;
  return static_cast<double>(hash & kExact);
}

// The same on all ranks of a mesh, as its hash() is of one process. Never 0.
double number_of_mesh(const DeviceMesh& mesh) {
  size_t hash = 1;
  for (const int64_t size : mesh.shape()) hash = c10::hash_combine(hash, static_cast<size_t>(size));
  for (const int64_t rank : mesh.ranks()) hash = c10::hash_combine(hash, static_cast<size_t>(rank));
  return exact(hash) + 1;
}

std::string line_of(const at::Tensor& parameter) {
  const auto* const found = RegistryEntry::of(parameter);
  if (found == nullptr) {
    const auto& style = *meta_of(parameter).style;
    return c10::str("parameter '", style.path, "' (tensor-parallel by operation ",
                    style.number_of_model, " of its mesh)\n");
  }
  const auto& entry = *found;
  return c10::str("parameter '", *entry.parameter_name(), "' (number ", entry.index(), " of unit '",
                  entry.group()->info().name(), "', which is number ",
                  entry.group()->info().number(), " of its ranks' units)\n");
}

// The same on all ranks; 0: it is the parameter of no unit, and not tensor-parallel.
size_t hash_of_parameter(const at::Tensor& parameter) {
  size_t hash = 1;
  if (const auto* const entry = RegistryEntry::of(parameter)) {
    hash = c10::hash_combine(hash, entry->group()->info().number());
    return c10::hash_combine(hash, static_cast<size_t>(entry->index()));
  }
  const auto* const meta = find_meta(parameter);
  if (meta == nullptr || !meta->style) return 0;
  for (const char letter : meta->style->path)
    hash = c10::hash_combine(hash, static_cast<size_t>(letter));
  return c10::hash_combine(hash, meta->style->number_of_model);
}

}  // namespace

void SameParameters::add(const at::Tensor& parameter) {
  const auto hash = hash_of_parameter(parameter);
  if (hash == 0) return;
  const auto mesh = number_of_mesh(spec_of(parameter).mesh());
  auto on = std::find_if(meshes_.begin(), meshes_.end(),
                         [mesh](const OnMesh& each) { return each.mesh == mesh; });
  if (on == meshes_.end()) on = meshes_.insert(on, OnMesh{mesh, 0, {}});
  on->hash = c10::hash_combine(on->hash, hash);
  on->parameters.push_back(parameter);
}

std::array<double, SameParameters::kNumbers> SameParameters::numbers() const {
  std::array<double, kNumbers> numbers{};
  const auto count = std::min(meshes_.size(), static_cast<size_t>(kMeshes));
  for (size_t i = 0; i < count; ++i) {
    numbers[2 * i] = meshes_[i].mesh;
    numbers[2 * i + 1] = exact(meshes_[i].hash);
  }
  return numbers;
}

void SameParameters::check(const at::Tensor& rows, const DeviceMesh& mesh, const Call& call) const {
  if (!rows.is_cpu()) return;
  struct Said {
    int64_t place;
    double hash;
  };
  const auto numbers = rows.contiguous();
  const auto* next = numbers.const_data_ptr<double>();
  std::map<double, Said> first;  // by mesh
  for (int64_t place = 0; place < numbers.size(0); ++place) {
    for (int64_t i = 0; i < kMeshes; ++i, next += 2) {
      if (next[0] == 0) continue;
      const auto& said = first.try_emplace(next[0], Said{place, next[1]}).first->second;
      if (said.hash != next[1]) report(next[0], said.place, place, mesh, call);
    }
  }
}

std::string SameParameters::text(double on) const {
  std::string text;
  for (const auto& each : meshes_) {
    if (each.mesh != on) continue;
    for (const auto& parameter : each.parameters) text += line_of(parameter);
  }
  return text;
}

void SameParameters::report(double on, int64_t first, int64_t other, const DeviceMesh& mesh,
                            const Call& call) const {
  const auto what = "agreement of the parameters of " + call.call;
  const auto mine = text(on);
  const auto lengths = agree(collectives_of(mesh), {.words = {static_cast<int64_t>(mine.size())},
                                                    .what = what,
                                                    .device = local_device(mesh)})
                           .words;
  TextOptions said = {.text = mine, .lengths = {}, .what = what, .device = local_device(mesh)};
  for (int64_t place = 0; place < lengths.size(0); ++place)
    said.lengths.push_back(lengths[place][0].item<int64_t>());
  const auto texts = texts_of_all(collectives_of(mesh), said);
  const auto place_of = [](int64_t place) { return static_cast<size_t>(place); };
  const auto lines = different_lines(texts[place_of(first)], texts[place_of(other)]);
  TORCH_CHECK_VALUE(false, call.call, ": the ranks do not mean the same parameters: rank ",
                    mesh.ranks()[place_of(first)], " ", call.verb, " ", lines.first, " where rank ",
                    mesh.ranks()[place_of(other)], " ", call.verb, " ", lines.other,
                    ". Every rank must give the same model's, in one order; ", call.consequence,
                    " (rank ", mesh.rank(), ")");
}

}  // namespace fsdp::internal
