// Meshes {"dp", "tp"} on which tests of tensor-parallel and sharded models run, ranks as
// threads.
//
//   class Training : public OnMeshes {};
//   TEST_P(Training, Converges) {
//     on_ranks([&](const DeviceMesh& mesh) { ... });
//   }
//   INSTANTIATE_TEST_SUITE_P(Meshes, Training, ::testing::ValuesIn(every_mesh()), name_of_mesh);
#pragma once

#include "device_mesh/device_mesh.h"
#include "on_demand/on_demand_storage.h"
#include "tests/support/mesh_in_memory.h"
#include "tests/support/thread_ranks.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::testing {

struct MeshSetting {
  int64_t dp, tp;
  bool cut_sequence = false;
  bool evict = false;  // empty and poison every group after every operator
};

inline std::string name_of_mesh(const ::testing::TestParamInfo<MeshSetting>& info) {
  const auto& [dp, tp, cut_sequence, evict] = info.param;
  return "Dp" + std::to_string(dp) + "Tp" + std::to_string(tp) +
         (cut_sequence ? "SequenceCut" : "") + (evict ? "Evicted" : "");
}

// With the sequence cut and not, evicting and not.
inline std::vector<MeshSetting> every_mesh() {
  std::vector<MeshSetting> settings;
  for (const auto& [dp, tp] : {std::pair{1, 2}, {1, 3}, {2, 2}, {1, 4}}) {
    for (const bool cut_sequence : {false, true}) {
      for (const bool evict : {false, true}) settings.push_back({dp, tp, cut_sequence, evict});
    }
  }
  return settings;
}

class OnMeshes : public ::testing::TestWithParam<MeshSetting> {
 protected:
  void SetUp() override { internal::set_evict_after_every_operator(GetParam().evict); }
  void TearDown() override { internal::set_evict_after_every_operator(false); }

  static bool cuts_sequence() { return GetParam().cut_sequence; }
  static void on_ranks(const std::function<void(const DeviceMesh&)>& body) {
    const auto& setting = GetParam();
    const MeshInMemory memory({setting.dp, setting.tp}, {"dp", "tp"}, {"reduce"});
    run_ranks(memory.size(), [&](int64_t) { body(memory.join()); });
  }
};

}  // namespace fsdp::testing
