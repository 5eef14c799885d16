// Ranks as threads: runs a test body once per rank of a small world, over real Gloo
// collectives in one process.
//
//   run_ranks(2, [](int64_t rank) {
//     auto mesh = fsdp::init_device_mesh(c10::kCPU, {2});
//     EXPECT_EQ(mesh.rank(), rank);
//   });
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

namespace fsdp::testing {

// Each thread has its own default group ("gloo", one intra-op thread), made before `body`
// and destroyed after it. A collective fails after 20 s. The first exception is thrown
// again once all threads have ended, with its rank in the text. Ends the process when
// they have not ended after `timeout`.
void run_ranks(int64_t world_size, const std::function<void(int64_t rank)>& body,
               std::chrono::milliseconds timeout = std::chrono::seconds(120));

// The same over another backend, such as "nccl".
void run_ranks_over(const std::string& backend, int64_t world_size,
                    const std::function<void(int64_t rank)>& body,
                    std::chrono::milliseconds timeout = std::chrono::seconds(120));

}  // namespace fsdp::testing
