// What one training step of the example takes on one rank: memory, collectives and
// floating-point operations. On any device whose allocator counts: a fake one
// (fake_device/), for a plan, or one that is there, to compare with.
#pragma once

#include "device_mesh/device_mesh.h"
#include "programs/trainer/setup/training_options.h"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace programs {

enum class StepPhase { kForward, kBackward, kOptimizer };
const char* name(StepPhase phase);

// What a device counts.
struct DeviceCounters {
  std::function<int64_t()> memory;  // bytes
  std::function<int64_t()> peak;    // of them since reset_peak()
  std::function<void()> reset_peak;
  std::function<double()> flops;  // of products of matrices since the start; null: not counted
};

// Bytes on this rank. The first four stay from step to step or from forward to backward,
// and are each measured where they are largest; `peak` is of all together.
struct StepMemory {
  int64_t parameters = 0;     // shards
  int64_t gradients = 0;      // shards of them
  int64_t optimizer = 0;      // its state
  int64_t activations = 0;    // what forward keeps for backward, the logits and the loss with it
  int64_t sharding_peak = 0;  // largest sum of unsharded parameters, staging and full gradients
  int64_t peak = 0;
  StepPhase peak_phase = StepPhase::kForward;
};

// Of one dimension of the mesh and one kind, in one step.
struct Traffic {
  std::string dim;         // "dp"
  std::string collective;  // "all-gather"
  int64_t group = 1;       // ranks of it: all of the dimension, or neighbours (to_world)
  int64_t count = 0;
  int64_t bytes = 0;  // that this rank gets from others
};

struct MeasuredStep {
  StepMemory memory;
  std::vector<Traffic> traffic;
  double flops = 0;            // of products, multiplications and additions counted each
  double unsharded_bytes = 0;  // of the model's parameters
};

// Shards the model that `make` gives, takes two steps, in which the order of units is
// learned and the optimizer makes its state, and measures the third. Batches are zeros.
// Collective over the mesh, which mesh_of() made.
MeasuredStep measure_step(const std::function<Transformer()>& make, const TrainingOptions& options,
                          const fsdp::DeviceMesh& mesh, const DeviceCounters& device);

}  // namespace programs
