// How a group's bytes travel between the ranks of one mesh dimension: the narrow
// interface the runtime speaks to. All calls are collective over the dimension, in one
// order on all ranks; none blocks.
#pragma once

#include "device_mesh/collectives/collectives.h"
#include "fully_shard/transport/stamp.h"

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

namespace fsdp::internal {

// The rows of a reduction carry their sender's stamp in the last kStampRoom bytes.
inline constexpr int64_t kStampRoom = 64;

struct ReducedRow {
  at::Tensor row;  // uint8, this rank's row summed over the ranks, without the stamp room
  std::vector<Stamp> stamps;  // one per rank, or none where the transport sums rows on the way
};

// A reduction in flight; owns its buffers.
class PendingReduction {
 public:
  virtual ~PendingReduction() = default;
  virtual int64_t staging_bytes() const = 0;
  // Starts what can be started by now; does not block. `what` as for wait().
  virtual void progress(const std::string& what) { static_cast<void>(what); }
  // REQUIRES: called once. `what` names the operation and unit in the error thrown on
  // failure or timeout.
  virtual ReducedRow wait(const std::string& what) = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;
  virtual int64_t rank() const = 0;
  virtual int64_t world() const = 0;
  // Bytes of every rank's `input`, rank-major, into `output` (both uint8, contiguous,
  // untouched until waited for).
  virtual Pending gather(const at::Tensor& output, const at::Tensor& input) = 0;
  // Row r of `rows` (uint8, [world, row bytes]; elements of `dtype`) goes to rank r,
  // which receives the sum.
  virtual std::unique_ptr<PendingReduction> reduce(at::Tensor rows, at::ScalarType dtype) = 0;
};

}  // namespace fsdp::internal
