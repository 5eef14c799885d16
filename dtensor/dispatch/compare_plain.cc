#define XXH_INLINE_ALL
#include "dtensor/dispatch/compare_plain.h"

#include "device_mesh/debug.h"
#include "device_mesh/internal/mesh_layout.h"
#include "device_mesh/on_mesh/mesh_collectives.h"
#include "dtensor/dtensor.h"
#include "dtensor/tensor/value_hash.h"

#include <c10/util/Exception.h>
#include <xxhash.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fsdp::internal {
namespace {

constexpr const char* kComparison = "comparison of plain tensors";

// "2", or "(0, 1)" on a mesh of two dimensions.
std::string coordinate_text(const DeviceMesh& mesh, int64_t place) {
  if (mesh.ndim() == 1) return std::to_string(place);
  std::string text;
  const auto coordinate = MeshLayout::row_major(mesh.shape()).coordinate_of(place).value();
  for (const int64_t index : coordinate)
    text += (text.empty() ? "(" : ", ") + std::to_string(index);
  return text + ")";
}

}  // namespace

bool counts_as_replicated(const at::Tensor& operand) {
  return operand.defined() && !is_dtensor(operand) && operand.layout() == c10::kStrided &&
         !operand.unsafeGetTensorImpl()->is_wrapped_number();
}

int64_t hash_of_plain(const at::Tensor& operand) {
  const auto shape = operand.sizes();
  uint64_t hash = static_cast<uint64_t>(operand.scalar_type());
  hash = XXH3_64bits_withSeed(shape.data(), shape.size() * sizeof(int64_t), hash);
  return static_cast<int64_t>(hash_of_values(operand, hash));
}

bool compares_plain() { return debug_options().check_replicated; }

void compare_plain(std::string_view what, at::TensorList operands, const DeviceMesh& mesh) {
  if (compares_plain()) check_alike(what, operands, mesh);
}

void check_alike(std::string_view what, at::TensorList operands, const DeviceMesh& mesh) {
  if (mesh.size() == 1) return;
  std::vector<int64_t> hashes;
  bool has_plain = false;
  for (const at::Tensor& operand : operands) {
    has_plain |= counts_as_replicated(operand);
    hashes.push_back(counts_as_replicated(operand) ? hash_of_plain(operand) : 0);
  }
  if (!has_plain) return;
  const auto found =
      agree(collectives_of(mesh),
            {.words = std::move(hashes), .what = kComparison, .device = local_device(mesh)})
          .difference;
  if (!found) return;
  TORCH_CHECK_VALUE(false, what,
                    ": a plain tensor beside DTensors is not the same on all ranks of ", mesh,
                    ", as it counts: operand ", found->word, ", of shape ",
                    operands[found->word].sizes(), ", differs between coordinates ",
                    coordinate_text(mesh, 0), " and ", coordinate_text(mesh, found->rank),
                    " (rank ", mesh.rank(), "; every rank of the mesh sees this error)");
}

}  // namespace fsdp::internal
