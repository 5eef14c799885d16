// An all-to-all of split sizes that is in flight (Collectives::start): each pair of ranks
// has a size of its own, which may be none.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::internal {

struct AllToAllSplitOptions {
  at::Tensor input;                        // uint8, contiguous: what goes to rank 0, to rank 1, ...
  std::vector<int64_t> input_split_sizes;  // bytes of it for each rank
  std::vector<int64_t> output_split_sizes;  // bytes that come from each rank
  std::string what;                         // the same on all ranks, and in every rank's errors
};

// Destroying one that was not waited for waits and swallows errors.
class PendingAllToAll {
 public:
  virtual ~PendingAllToAll() = default;
  // REQUIRES: called once. What each rank has sent to this one, by group rank: uint8
  // [bytes], to be read only. Throws what failed (DistBackendError naming operation and
  // ranks); where ranks issued different operations, an error that names both; where a
  // rank has sent another size than was expected here, one that names both sizes.
  virtual std::vector<at::Tensor> wait() = 0;
};

}  // namespace fsdp::internal
