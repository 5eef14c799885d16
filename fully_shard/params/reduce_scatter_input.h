// The reduce-scatter input of one group and dtype (PyTorch's reduce_scatter_input): each
// full gradient is packed into its rows as soon as autograd delivers it, so a complete
// group leaves without another copy.
//
//   row r, sent to rank r:  | flags | chunk r of parameter 0 | chunk r of parameter 1 | ... |
//
// The rows are memory of the stream that is current when the input is made. Each
// gradient is packed on the stream that is current then.
//
// Flags add up to the number of ranks that raised them: one per parameter that was used,
// and one for gradients that came after their reduction had left. Where the transport
// reads none (Transport::reads_flags) the rows have none, and the ranks tell each other
// which parameters were used, if they can (step/exchange_after_backward.h).
#pragma once

#include "fully_shard/transport/packed_layout.h"
#include "fully_shard/transport/stream_memory.h"
#include "fully_shard/transport/transport.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace fsdp::internal {

struct TrainableParam {
  int64_t index = 0;  // in the group
  ShardExtent extent = {};
  std::vector<int64_t> shard_shape = {};  // of this rank's part
};

class ReduceScatterInput {
 public:
  enum class Late { kNone, kSome };
  // Without rows: of a rank that adds nothing to a sum, and reads it.
  enum class Rows { kAllocated, kNone };

  ReduceScatterInput(std::vector<TrainableParam> params, at::ScalarType dtype, Transport& transport,
                     c10::Device device, Rows rows = Rows::kAllocated);
  ~ReduceScatterInput();
  ReduceScatterInput(ReduceScatterInput&&) = default;
  ReduceScatterInput& operator=(ReduceScatterInput&&) = default;

  at::ScalarType dtype() const { return dtype_; }
  int64_t row_bytes() const { return flag_bytes() + layout_.row_bytes(); }
  // How many bytes at the start of each row are used. Empty if every row is fully used.
  std::vector<int64_t> lengths() const;
  int64_t nbytes() const { return static_cast<int64_t>(rows_.nbytes()); }
  bool complete() const { return arrived_count_ == static_cast<int64_t>(params_.size()); }
  // The same, without waiting for those of which waits(index in the group) is true.
  template <class Waits>
  bool complete_but_for(const Waits& waits) const {
    if (complete()) return true;
    for (size_t i = 0; i < params_.size(); ++i) {
      if (!arrived_[i] && !waits(params_[i].index)) return false;
    }
    return true;
  }
  const std::vector<TrainableParam>& params() const { return params_; }
  // Position of group parameter `index` here, or -1.
  int64_t position(int64_t index) const;

  // Casts `gradient`, which is full size, to this dtype. Adds to what arrived before.
  void add(int64_t position, const at::Tensor& gradient);
  // Fills what has not arrived with zeros and hands the rows over (uint8, [ranks, row
  // bytes]), packed. REQUIRES: the stream they belong to is current.
  at::Tensor release_rows(Late late);

  // Whether this rank used each parameter. REQUIRES: released.
  const std::vector<bool>& used_here() const { return arrived_; }
  // The ranks told each other which parameters some rank used.
  void set_used(std::vector<bool> used) { used_ = std::move(used); }

  // Of a reduced row, this rank's, of any dtype: its part of parameter `position`, in the
  // shape of the shard; and whether any rank used each parameter. Where flags are not
  // read and nothing was told, all count as used.
  at::Tensor part(const at::Tensor& row, int64_t position) const;
  std::vector<bool> used(const at::Tensor& row) const;
  // All gradients of the row and the padding between them: [elements], as far as the row
  // goes. A view.
  at::Tensor elements(const at::Tensor& row) const;
  // Adds `part`, of a parameter that some rank used, to its place in a reduced row.
  void add_part(at::Tensor& row, int64_t position, const at::Tensor& part);
  // Whether some rank had late gradients. Never where flags are not read.
  bool late(const at::Tensor& row) const;

 private:
  void write_flags(Late late);
  int64_t flag_count() const { return reads_flags_ ? static_cast<int64_t>(params_.size()) + 1 : 0; }
  int64_t flag_bytes() const;
  int64_t first_element() const;  // behind the flags
  // Whether each flag of the row is raised by some rank.
  std::vector<bool> read_flags(const at::Tensor& row) const;

  std::vector<TrainableParam> params_;
  int64_t shard_count_, shard_rank_;
  bool reads_flags_;
  PackedLayout layout_;
  at::ScalarType dtype_;
  at::Tensor rows_, chunks_;  // uint8 [ranks, bytes]; what of them is behind the flags
  StreamMemory memory_{StreamWait::kPackAfterAllocation, StreamWait::kReduceAfterPacking};
  std::vector<bool> arrived_;
  int64_t arrived_count_ = 0;
  std::vector<bool> used_;  // by some rank, where they told each other; else empty
};

}  // namespace fsdp::internal
