#include "fully_shard/units/write_checks.h"

#include "fully_shard/raw_access.h"

#include <atomic>

namespace fsdp {
namespace {

std::atomic<bool> enabled{false};

}  // namespace

void set_write_checks(bool on) { enabled.store(on, std::memory_order_relaxed); }

namespace internal {

bool write_checks() { return enabled.load(std::memory_order_relaxed); }

}  // namespace internal
}  // namespace fsdp
