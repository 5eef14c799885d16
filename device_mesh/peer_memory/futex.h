// Sleeping until a word in shared memory is no longer what it was. Linux only.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace fsdp::internal {

// Returns when it is rung, at once when `word` is not `seen`, and after `at_most`; also
// for no reason.
void sleep_on(const std::atomic<uint32_t>& word, uint32_t seen, std::chrono::milliseconds at_most);
// Wakes all that sleep on it, in any process.
void wake_all(const std::atomic<uint32_t>& word);

}  // namespace fsdp::internal
