#define XXH_INLINE_ALL
#include "dtensor/manual_seed.h"

#include "dtensor/random/thread_generators.h"

#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/graph_task.h>
#include <xxhash.h>

#include <memory>

namespace fsdp {
namespace {

uint64_t seed_of_slice(uint64_t seed, int64_t index) {
  return index == 0 ? seed : XXH3_64bits_withSeed(&index, sizeof(index), seed);
}

// Their ends put back what the thread included before.
void check_lasts(const char* what) {
  TORCH_CHECK_VALUE(!c10::InferenceMode::is_enabled(), what,
                    " inside an InferenceMode would end with it; call it before");
  TORCH_CHECK_VALUE(torch::autograd::get_current_graph_task_id() == -1, what,
                    " inside a backward would end with it; call it before or after");
}

}  // namespace

void manual_seed(uint64_t seed, const DeviceMesh& mesh) {
  check_lasts("manual_seed");
  internal::exchange_thread_generators(std::make_shared<internal::ThreadGenerators>(
      seed_of_slice(seed, mesh.slice_index()), mesh.ranks()));
}

void use_default_generator() {
  check_lasts("use_default_generator");
  internal::exchange_thread_generators(nullptr);
}

}  // namespace fsdp
