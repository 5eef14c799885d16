// Tests that run on every rank of worlds of several sizes, ranks as threads.
//
//   class Training : public Worlds {};
//   TEST_P(Training, Converges) {
//     on_ranks([&](int64_t rank, const DeviceMesh& mesh) { EXPECT_EQ(mesh.rank(), rank); });
//     on_ranks([&](const DeviceMesh& mesh) { EXPECT_EQ(mesh.size(), world()); });
//   }
//   INSTANTIATE_WORLDS(Training, 1, 2, 3);
#pragma once

#include "device_mesh/device_mesh.h"
#include "tests/support/thread_ranks.h"

#include <c10/core/DeviceType.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>

namespace fsdp::testing {

// `body` on every rank of a world of `world`, with its 1-D CPU mesh; see run_ranks.
inline void on_ranks_of(int64_t world,
                        const std::function<void(int64_t rank, const DeviceMesh& mesh)>& body) {
  run_ranks(world, [&](int64_t rank) { body(rank, init_device_mesh(c10::kCPU, {world})); });
}
inline void on_ranks_of(int64_t world, const std::function<void(const DeviceMesh& mesh)>& body) {
  on_ranks_of(world, [&](int64_t, const DeviceMesh& mesh) { body(mesh); });
}

inline void on_one_rank(const std::function<void(const DeviceMesh& mesh)>& body) {
  on_ranks_of(1, body);
}

class Worlds : public ::testing::TestWithParam<int64_t> {
 protected:
  int64_t world() const { return GetParam(); }
  void on_ranks(const std::function<void(int64_t rank, const DeviceMesh& mesh)>& body) const {
    on_ranks_of(world(), body);
  }
  void on_ranks(const std::function<void(const DeviceMesh& mesh)>& body) const {
    on_ranks_of(world(), body);
  }
};

}  // namespace fsdp::testing

// Names the instances World1, World2, ...
#define INSTANTIATE_WORLDS(suite, ...)                                    \
  INSTANTIATE_TEST_SUITE_P(Worlds, suite, ::testing::Values(__VA_ARGS__), \
                           [](const auto& info) { return "World" + std::to_string(info.param); })
