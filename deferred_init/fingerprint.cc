#define XXH_INLINE_ALL
#include "deferred_init/fingerprint.h"

#include "deferred_init/deferred_storage.h"
#include "dtensor/tensor/value_hash.h"

#include <xxhash.h>

namespace fsdp::internal {

uint64_t fingerprint_of(const at::Tensor& tensor) {
  const auto* const storage = DeferredStorage::of(tensor);
  const Tape& tape = *storage->tape();
  uint64_t hash = 0;
  for (const int64_t index : tape.dependencies().needed_for({storage->value()}, tape.size())) {
    const Step& step = tape.step(index);
    const auto& name = step.op.schema().name();
    hash = XXH3_64bits_withSeed(name.data(), name.size(), hash);
    if (step.generator_state.defined()) hash = hash_of_values(step.generator_state, hash);
  }
  return hash;
}

}  // namespace fsdp::internal
