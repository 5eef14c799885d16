// What LibTorch asks an accelerator for beside its guard: default generators, pinned
// memory, the device that an address lies on.
#pragma once

namespace at {
struct PrivateUse1HooksInterface;
}

namespace fsdp::testing::simulated {

at::PrivateUse1HooksInterface* hooks();

}  // namespace fsdp::testing::simulated
