#include "device_mesh/debug.h"

#include <atomic>

namespace fsdp {
namespace {

std::atomic<DebugOptions> current_debug_options{DebugOptions{}};

}  // namespace

void set_debug_options(DebugOptions options) { current_debug_options = options; }

DebugOptions debug_options() { return current_debug_options.load(std::memory_order_relaxed); }

}  // namespace fsdp
