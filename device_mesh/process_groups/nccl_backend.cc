#include "device_mesh/process_groups/nccl_backend.h"

#ifdef USE_C10D_NCCL
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

namespace fsdp::internal {

#ifdef USE_C10D_NCCL
MakeBackend nccl_factory() {
  return [](const GroupMember& member) {
    auto options = c10d::ProcessGroupNCCL::Options::create();
    // Kernels of collectives get their place beside those that fill the device.
    options->is_high_priority_stream = true;
    options->timeout = member.timeout;
    options->group_name = member.name;
    options->global_ranks_in_group = member.global_ranks;
    auto store = c10::make_intrusive<c10d::PrefixStore>("nccl", member.store);
    return c10::make_intrusive<c10d::ProcessGroupNCCL>(store, member.rank, member.size, options);
  };
}

// Another communicator would take the memory of one more.
ConnectBackend nccl_connector() {
  return [](c10d::Backend& backend, c10::Device device) {
    auto& nccl = dynamic_cast<c10d::ProcessGroupNCCL&>(backend);
    if (!nccl.isInitialized()) nccl.eagerConnectSingleDevice(device);
  };
}
#else
MakeBackend nccl_factory() { return {}; }
ConnectBackend nccl_connector() { return {}; }
#endif

}  // namespace fsdp::internal
