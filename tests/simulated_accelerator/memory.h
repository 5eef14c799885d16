// The memory of the devices, as blocks that belong to the stream they were first
// allocated on. A block that was given back is handed out again on its stream at once, as
// a caching allocator for CUDA does: it does not ask whether other streams still use it.
// Blocks are powers of two, never split and never returned to the host. Held by the
// machine's lock.
#pragma once

#include "tests/simulated_accelerator/access_history.h"

#include <c10/core/Device.h>

#include <cstddef>
#include <map>
#include <memory>
#include <utility>
#include <vector>

namespace fsdp::testing::simulated {

struct Block {
  char* data;
  size_t bytes;
  size_t queue;  // of the stream it belongs to
  c10::DeviceIndex device;
  size_t requested = 0;  // of the bytes, by who has it now
  AccessHistory accesses = {};

  // A block that record_stream() was called for is never handed out again, as if its
  // other streams never finished.
  enum class Reuse { kAtOnce, kNever };
  Reuse reuse = Reuse::kAtOnce;
};

class Memory {
 public:
  struct HandedOut {
    Block* block;
    bool is_new;
  };

  HandedOut hand_out(size_t bytes, size_t queue, c10::DeviceIndex device);
  void take_back(Block* block);

  // The block that `address` lies in, or null.
  Block* block_at(const void* address);

  // All that was done so far is ordered before all that comes.
  void forget_accesses();

 private:
  std::map<const char*, std::unique_ptr<Block>> blocks_;                // by first byte
  std::map<std::pair<size_t, size_t>, std::vector<Block*>> available_;  // by queue and size
};

}  // namespace fsdp::testing::simulated
