#include "deferred_init/scratch_bytes.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <cstddef>

namespace fsdp::internal {
namespace {

constexpr int64_t kOwnPages = int64_t{256} << 10;  // bytes

}  // namespace

at::Tensor scratch_bytes(int64_t nbytes) {
  const auto options = at::TensorOptions().dtype(at::kByte);
  if (nbytes < kOwnPages) return at::empty({nbytes}, options);
  const auto length = static_cast<size_t>(nbytes);
  auto* const pages =
      mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(pages != MAP_FAILED, "deferred_init: can not allocate ", nbytes, " bytes");
  return at::from_blob(
      pages, {nbytes}, [length](void* data) { munmap(data, length); }, options);
}

}  // namespace fsdp::internal
