// A random number generator for each device, which draws what the CPU's generator draws
// from the same seed. So a model with dropout gives the CPU's bits.
#pragma once

#include <ATen/core/Generator.h>

namespace fsdp::testing::simulated {

// What torch::manual_seed() seeds; `device` below 0: of the current device.
const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator new_generator(c10::DeviceIndex device);

// The same state as a generator that CPU kernels take, and back. The caller holds the
// lock of the device's generator.
at::Generator cpu_generator_like(const at::Generator& device_generator);
void advance(const at::Generator& device_generator, const at::Generator& cpu_generator);

}  // namespace fsdp::testing::simulated
