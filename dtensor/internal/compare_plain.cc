#define XXH_INLINE_ALL
#include "dtensor/internal/compare_plain.h"

#include "device_mesh/collectives/words_of_ranks.h"
#include "dtensor/check_replicated.h"
#include "dtensor/dtensor.h"
#include "dtensor/internal/value_hash.h"

#include <c10/util/Exception.h>
#include <xxhash.h>

#include <atomic>
#include <cstdint>
#include <optional>
#include <sstream>
#include <string_view>
#include <vector>

namespace fsdp {
namespace {

std::atomic<bool> checks_replicated{false};

}  // namespace

void set_check_replicated(bool on) { checks_replicated = on; }

namespace internal {
namespace {

using Words = std::vector<int64_t>;

constexpr const char* kComparison = "comparison of plain tensors";

// Numbers that a caller wrote are what the code says, on every rank.
bool counts_as_replicated(const at::Tensor& operand) {
  return operand.defined() && !is_dtensor(operand) && operand.layout() == c10::kStrided &&
         !operand.unsafeGetTensorImpl()->is_wrapped_number();
}

int64_t hash_of(const at::Tensor& tensor) {
  uint64_t hash = static_cast<uint64_t>(tensor.scalar_type());
  hash = XXH3_64bits_withSeed(tensor.sizes().data(), tensor.sizes().size() * sizeof(int64_t), hash);
  return static_cast<int64_t>(hash_of_values(tensor, hash));
}

// Which operand differs along a mesh dimension, and the first rank that has another one.
struct Difference {
  size_t operand;
  int64_t dim, index;
};

std::optional<Difference> difference_along(int64_t dim, const Words& hashes,
                                           const DeviceMesh& mesh) {
  const auto found = first_difference(words_of_ranks(hashes, mesh, dim, kComparison));
  if (!found.has_value()) return std::nullopt;
  return Difference{found->word, dim, found->index};
}

// Whether some rank of the mesh found a difference. Collective.
bool found_by_some(bool found, const DeviceMesh& mesh) {
  for (int64_t dim = 0; dim < mesh.ndim(); ++dim)
    found = words_of_ranks({found ? 1 : 0}, mesh, dim, kComparison).any().item<bool>();
  return found;
}

[[noreturn]] void report(std::string_view what, at::TensorList operands,
                         const std::optional<Difference>& own, const DeviceMesh& mesh) {
  std::ostringstream text;
  text << what << ": a plain tensor beside DTensors is not the same on all ranks of " << mesh
       << ", as it counts: ";
  if (own.has_value()) {
    text << "operand " << own->operand << ", of shape " << operands[own->operand].sizes()
         << ", differs between coordinates 0 and " << own->index << " of mesh dimension "
         << own->dim;
  } else {
    text << "other ranks found it";
  }
  TORCH_CHECK_VALUE(false, text.str(), " (rank ", mesh.rank(),
                    "; every rank of the mesh sees this error)");
}

}  // namespace

bool compares_plain() { return checks_replicated.load(std::memory_order_relaxed); }

void compare_plain(std::string_view what, at::TensorList operands, const DeviceMesh& mesh) {
  if (!compares_plain() || mesh.size() == 1) return;
  Words hashes;
  bool has_plain = false;
  for (const at::Tensor& operand : operands) {
    has_plain |= counts_as_replicated(operand);
    hashes.push_back(counts_as_replicated(operand) ? hash_of(operand) : 0);
  }
  if (!has_plain) return;
  std::optional<Difference> own;
  for (int64_t dim = 0; dim < mesh.ndim(); ++dim) {
    const auto along = difference_along(dim, hashes, mesh);
    if (!own.has_value()) own = along;
  }
  const bool found = mesh.ndim() == 1 ? own.has_value() : found_by_some(own.has_value(), mesh);
  if (found) report(what, operands, own, mesh);
}

}  // namespace internal
}  // namespace fsdp
