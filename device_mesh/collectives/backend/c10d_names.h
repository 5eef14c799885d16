// What LibTorch calls the collectives of one tensor on each side, which 2.15 renamed:
//
//   ((*group).*kAllGather)(rows, row, {})->wait();
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/headeronly/version.h>

namespace fsdp::internal {

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 15
inline constexpr auto kAllGather = &c10d::ProcessGroup::_allgather_base;
inline constexpr auto kReduceScatter = &c10d::ProcessGroup::_reduce_scatter_base;
inline constexpr auto kAllToAll = &c10d::ProcessGroup::alltoall_base;
#else
inline constexpr auto kAllGather = &c10d::ProcessGroup::all_gather_single;
inline constexpr auto kReduceScatter = &c10d::ProcessGroup::reduce_scatter_single;
inline constexpr auto kAllToAll = &c10d::ProcessGroup::all_to_all_single;
#endif

}  // namespace fsdp::internal
