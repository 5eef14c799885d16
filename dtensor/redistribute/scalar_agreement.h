// The check that all ranks used the same scalars (scalar_hash.h) in what one
// redistribution brings together.
//
//   ScalarAgreement moved(scalars, local.numel() > 0);
//   moved.send([&](NoticeWords words) {                  // once per collective of the move
//     return collectives.all_gather({..., .words = words});
//   });
//   moved.check(mesh);
#pragma once

#include "device_mesh/collectives/notice.h"
#include "device_mesh/device_mesh.h"
#include "dtensor/tensor/scalar_hash.h"

#include <array>
#include <cstdint>
#include <vector>

namespace fsdp::internal {

class ScalarAgreement {
 public:
  // A rank whose part has no elements has computed nothing, and may have left that out.
  ScalarAgreement(const ScalarHash& scalars, bool has_elements);

  template <class Collective>
  void send(const Collective& collective) {
    compare(collective(NoticeWords{.agreement = word_}));
  }
  // Throws ValueError where they differ, on all ranks that the move brings together.
  // Local.
  void check(const DeviceMesh& mesh) const;

 private:
  void compare(const std::vector<NoticeWords>& words);

  std::array<const char*, 3> taken_by_;
  uint64_t word_;
};

}  // namespace fsdp::internal
