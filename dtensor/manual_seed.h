// Random numbers that several ranks have in step.
//
//   auto mesh = fsdp::init_device_mesh(torch::kCPU, {2, 2}, {"dp", "tp"});
//   fsdp::parallelize_module(model, mesh["tp"], plan);
//   fsdp::manual_seed(1, mesh["tp"]);   // alike over tp, different over dp
//   loss(model->forward(tokens));       // dropout: the masks of one device
//
// Every rank draws the numbers of a whole DTensor and keeps its part, and draws those of
// a plain tensor like the other ranks. So masks are those of one device, whatever the
// number of ranks, as long as the ranks' generators are in the same state.
#pragma once

#include "device_mesh/api.h"
#include "device_mesh/device_mesh.h"

#include <cstdint>

namespace fsdp {

// From now on this thread draws from generators of its own, one per device, seeded alike
// on all ranks of `mesh`: LibTorch's operators that are given no generator, on plain
// tensors and DTensors, called by name or by other operators. The ranks stay in step
// while they run the same operators. Slices of one mesh draw differently: those whose
// index is 0 as one device after torch::manual_seed(seed), the others from seeds that
// follow from `seed` and the index. It holds until use_default_generator(), or the next
// call. LibTorch's default generators are left alone.
//
// Ranks that are threads need it, since they share the default generators; for processes
// parallelize_module() brings those in step already.
//
// Operators of a device other than the CPU that take no generator (dropout on CUDA) draw
// from the device's default one, which has this thread's state meanwhile: no other thread
// may use that device then. Autograd's threads for devices draw from the default ones,
// but for what fsdp::checkpoint runs again there. A DTensor can be filled with random
// numbers only where all ranks that hold it are ranks of `mesh`; else ValueError says so.
//
// Local. Throws ValueError inside an InferenceMode or a backward, with which it would
// end.
FSDP_API void manual_seed(uint64_t seed, const DeviceMesh& mesh);

// This thread draws from LibTorch's default generators again. Local. Throws as
// manual_seed.
FSDP_API void use_default_generator();

}  // namespace fsdp
