// Which ranks of the job a process group consists of, for messages: c10d's groups know
// their own numbering only.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <string>
#include <vector>

namespace c10d {
class ProcessGroup;
}

namespace fsdp::internal {

// By group rank. Kept as long as the group. Thread-safe.
void set_ranks_in_job(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                      std::vector<int64_t> ranks);
// The same, unless they are known. Thread-safe.
void note_ranks_in_job(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                       std::vector<int64_t> ranks);
// 0, 1, ... where they were never set.
std::vector<int64_t> ranks_in_job(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

// "0, 2, 3"
std::string rank_list(const std::vector<int64_t>& ranks);

}  // namespace fsdp::internal
