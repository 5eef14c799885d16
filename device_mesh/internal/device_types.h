// Device types as LibTorch knows them: which ones are accelerators, how many devices of
// one are here, and on which device the calling thread is. Local.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/DispatchKey.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace fsdp::internal {

// Every type that LibTorch calls an accelerator, whether there are such devices or not.
std::vector<c10::DeviceType> accelerator_types();
// The dispatch keys of those types for Dense, or for AutogradFunctionality.
std::vector<c10::DispatchKey> accelerator_keys(c10::DispatchKey functionality);
// How many devices of this type the process sees; 0 too where the build lacks them.
int64_t visible_devices(c10::DeviceType type);
// What LibTorch takes for the accelerator of this process; none where it sees no device.
std::optional<c10::DeviceType> visible_accelerator();
// The calling thread's current device of this type. Without an index for the CPU, and
// where the process sees no device of the type.
c10::Device current_device(c10::DeviceType type);

}  // namespace fsdp::internal
