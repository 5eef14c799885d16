// What a process group is called in its job, for ranks to speak of it.
#pragma once

#include "device_mesh/collectives/group.h"

#include <c10/util/intrusive_ptr.h>

#include <optional>
#include <string>

namespace c10d {
class Store;
}

namespace fsdp::internal {

struct GroupName {
  c10::intrusive_ptr<c10d::Store> store;  // of the job, below all key spaces
  std::string job;                        // the key space of the world that the group was made from
  std::string group;  // the same on all its ranks, and of no other group of the job
};

// None for a group that was not made from a world of ours (process_group_factory.h), and
// where there is no store. Local.
std::optional<GroupName> name_in_job(const Group& group);

}  // namespace fsdp::internal
