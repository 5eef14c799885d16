#include "device_mesh/debug.h"

#include <atomic>

namespace fsdp {
namespace {

// As large as a word that processors read and write at once.
struct alignas(4) Word {
  DebugOptions options;
};
std::atomic<Word> current_debug_options{Word{}};
static_assert(std::atomic<Word>::is_always_lock_free);

}  // namespace

void set_debug_options(DebugOptions options) { current_debug_options = Word{options}; }

DebugOptions debug_options() {
  return current_debug_options.load(std::memory_order_relaxed).options;
}

}  // namespace fsdp
