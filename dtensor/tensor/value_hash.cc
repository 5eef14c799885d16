#define XXH_INLINE_ALL
#include "dtensor/tensor/value_hash.h"

#include <xxhash.h>

namespace fsdp::internal {

uint64_t hash_of_values(const at::Tensor& plain, uint64_t seed) {
  if (plain.numel() == 0) return seed;
  const at::Tensor values = plain.detach().resolve_conj().resolve_neg().cpu().contiguous();
  return XXH3_64bits_withSeed(values.const_data_ptr(), values.nbytes(), seed);
}

}  // namespace fsdp::internal
