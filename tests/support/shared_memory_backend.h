// Collectives of ranks that are threads, by copying from rank to rank: no sockets and no
// threads of its own, so thousands of small programs run in the time that Gloo takes for
// hundreds.
//
//   const auto memory = make_shared_memory(world);             // before the ranks start
//   run_ranks(world, [&](int64_t rank) {
//     ...
//     use_shared_memory(mesh.group(0), memory);
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>

namespace c10d {
class ProcessGroup;
}

namespace fsdp::testing {

// Where the ranks of one group meet.
class SharedMemory;
std::shared_ptr<SharedMemory> make_shared_memory(int64_t world);

// From now on the CPU collectives of `group` go through `memory`, which every rank of the
// group gives, for this group only. All-gather, all-to-all, broadcast and all-reduce
// (sum, minimum, maximum), and messages between two ranks. A collective fails after 20 s,
// or when a rank destroyed its group before it came. Local.
void use_shared_memory(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                       std::shared_ptr<SharedMemory> memory);

}  // namespace fsdp::testing
