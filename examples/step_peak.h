// How much a step takes beside the shards.
#pragma once

#include "device_mesh/device_mesh.h"
#include "fully_shard/counters.h"

#include <algorithm>
#include <cstdint>
#include <utility>

namespace examples {

// Of this rank, in bytes: unsharded parameters, rows on their way and full gradients at
// one moment (Counters::peak_bytes). Nobody else calls reset_peak. Local.
class StepPeak {
 public:
  explicit StepPeak(fsdp::DeviceMesh mesh) : mesh_(std::move(mesh)) {}

  // A step begins.
  void begin() {
    before_ = highest();
    fsdp::reset_peak(mesh_);
  }
  // Since then.
  int64_t of_step() const { return fsdp::counters(mesh_).peak_bytes; }
  // Since the start.
  int64_t highest() const { return std::max(before_, of_step()); }

 private:
  fsdp::DeviceMesh mesh_;
  int64_t before_ = 0;
};

}  // namespace examples
