#include "tests/simulated_accelerator/memory.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <iterator>

namespace fsdp::testing::simulated {
namespace {

constexpr size_t kSmallestBlock = 512;

}  // namespace

Memory::HandedOut Memory::hand_out(size_t bytes, size_t queue, c10::DeviceIndex device) {
  const auto rounded = std::max(kSmallestBlock, std::bit_ceil(bytes));
  auto& available = available_[{queue, rounded}];
  if (!available.empty()) {
    auto* const block = available.back();
    available.pop_back();
    return {block, false};
  }
  auto* const data = static_cast<char*>(std::aligned_alloc(kSmallestBlock, rounded));
  auto& block = blocks_[data];
  block.reset(new Block{data, rounded, queue, device});
  return {block.get(), true};
}

void Memory::take_back(Block* block) {
  if (block->reuse == Block::Reuse::kNever) return;
  available_[{block->queue, block->bytes}].push_back(block);
}

Block* Memory::block_at(const void* address) {
  const auto* const byte = static_cast<const char*>(address);
  const auto after = blocks_.upper_bound(byte);
  if (after == blocks_.begin()) return nullptr;
  auto* const block = std::prev(after)->second.get();
  return byte < block->data + block->bytes ? block : nullptr;
}

void Memory::forget_accesses() {
  for (auto& [data, block] : blocks_) block->accesses.forget();
}

}  // namespace fsdp::testing::simulated
