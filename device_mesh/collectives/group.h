// A process group as the collectives see it, without c10d's heavy headers.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace at {
class Tensor;
}
namespace c10d {
class ProcessGroup;
class Store;
}  // namespace c10d

namespace fsdp::internal {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

int64_t group_rank(const Group& group);
int64_t group_size(const Group& group);
std::string group_backend(const Group& group);  // "gloo", "nccl", "fake", ...
// Whether one of its backends takes tensors of such a device.
bool serves(const Group& group, c10::DeviceType device_type);
// Whether CPU tensors travel through Gloo: in groups of a device's backend too.
bool has_gloo(const Group& group);

// What a process group is called in its job, for ranks to speak of it.
struct GroupName {
  c10::intrusive_ptr<c10d::Store> store;  // of the job, below all key spaces
  std::string job;                        // the key space of the world that the group was made from
  std::string group;  // the same on all its ranks, and of no other group of the job
};

// None for a group that was not made from a world of ours (process_group_factory.h), and
// where there is no store. Local.
std::optional<GroupName> name_in_job(const Group& group);

// Which ranks of the job a process group consists of, by group rank, for messages: c10d's
// groups know their own numbering only. Kept as long as the group. Thread-safe.
void set_ranks_in_job(const Group& group, std::vector<int64_t> ranks);
// The same, unless they are known. Thread-safe.
void note_ranks_in_job(const Group& group, std::vector<int64_t> ranks);
// 0, 1, ... where they were never set.
std::vector<int64_t> ranks_in_job(const Group& group);

// "0, 2, 3"
std::string rank_list(const std::vector<int64_t>& ranks);

}  // namespace fsdp::internal
