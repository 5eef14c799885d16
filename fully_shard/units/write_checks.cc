#include "fully_shard/units/write_checks.h"

#include <atomic>

namespace fsdp::internal {
namespace {

std::atomic<bool> enabled{false};

}  // namespace

bool write_checks() { return enabled.load(std::memory_order_relaxed); }

void enable_write_checks(bool on) { enabled.store(on, std::memory_order_relaxed); }

}  // namespace fsdp::internal
