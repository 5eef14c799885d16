// The installation of the simulated accelerator as this process's device for
// DeviceType::PrivateUse1, named "simulated", and so at::getAccelerator(). It stays until
// the process ends: tests on it are a program of their own.
#pragma once

namespace fsdp::testing::simulated {

// Does nothing the second time.
void install();

}  // namespace fsdp::testing::simulated
