#define XXH_INLINE_ALL
#include "dtensor/internal/compare_plain.h"

#include "device_mesh/collectives/collectives.h"
#include "device_mesh/collectives/issue_log.h"
#include "dtensor/check_replicated.h"
#include "dtensor/dtensor.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>
#include <xxhash.h>

#include <atomic>
#include <cstdint>
#include <optional>
#include <sstream>
#include <vector>

namespace fsdp {
namespace {

std::atomic<bool> checks_replicated{false};

}  // namespace

void set_check_replicated(bool on) { checks_replicated = on; }

namespace internal {
namespace {

using Words = std::vector<int64_t>;

// Numbers that a caller wrote are what the code says, on every rank.
bool counts_as_replicated(const at::Tensor& operand) {
  return operand.defined() && !is_dtensor(operand) && operand.layout() == c10::kStrided &&
         !operand.unsafeGetTensorImpl()->is_wrapped_number();
}

int64_t hash_of(const at::Tensor& tensor) {
  uint64_t hash = static_cast<uint64_t>(tensor.scalar_type());
  hash = XXH3_64bits_withSeed(tensor.sizes().data(), tensor.sizes().size() * sizeof(int64_t), hash);
  const at::Tensor values = tensor.detach().cpu().contiguous();
  if (values.numel() > 0)
    hash = XXH3_64bits_withSeed(values.const_data_ptr(), values.nbytes(), hash);
  return static_cast<int64_t>(hash);
}

// The words of all ranks of mesh dimension `dim`, [ranks, words]. Collective.
at::Tensor words_of_all(const Words& own, const DeviceMesh& mesh, int64_t dim) {
  const at::Tensor mine = at::tensor(own, c10::kLong).to(local_device(mesh));
  const auto count = static_cast<int64_t>(own.size());
  const at::Tensor all = at::empty({mesh.size(dim) * count}, mine.options());
  IssueLog::of(mesh, dim)->run({.kind = CollectiveKind::kAllGather,
                                .what = "comparison of plain tensors",
                                .bytes = static_cast<int64_t>(mine.nbytes())},
                               [&] { return all_gather(mesh.group(dim), all, mine); });
  return all.cpu().view({mesh.size(dim), count});
}

// Which operand differs along a mesh dimension, and the first rank that has another one.
struct Difference {
  size_t operand;
  int64_t dim, index;
};

std::optional<Difference> difference_along(int64_t dim, const Words& hashes,
                                           const DeviceMesh& mesh) {
  const at::Tensor all = words_of_all(hashes, mesh, dim);
  for (size_t i = 0; i < hashes.size(); ++i) {
    const at::Tensor column = all.select(1, static_cast<int64_t>(i));
    for (int64_t r = 1; r < mesh.size(dim); ++r) {
      if (!column[r].equal(column[0])) return Difference{i, dim, r};
    }
  }
  return std::nullopt;
}

// Whether some rank of the mesh found a difference. Collective.
bool found_by_some(bool found, const DeviceMesh& mesh) {
  for (int64_t dim = 0; dim < mesh.ndim(); ++dim)
    found = words_of_all({found ? 1 : 0}, mesh, dim).any().item<bool>();
  return found;
}

[[noreturn]] void report(const std::string& what, at::TensorList operands,
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

void compare_plain(const std::string& what, at::TensorList operands, const DeviceMesh& mesh) {
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
