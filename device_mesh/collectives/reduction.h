// A sum over the ranks that is in flight (Collectives::start): of rows, each for another
// rank, or of one row for all.
#pragma once

#include "device_mesh/collectives/notice.h"
#include "device_mesh/collectives/send_function.h"
#include "device_mesh/collectives/sum_in_order.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::internal {

// A reduce-scatter.
struct SumRowsOptions {
  at::Tensor rows;  // uint8 [ranks, row bytes], each row contiguous; row r goes to rank r
  // The bytes at the beginning of each row that are to be added up; none: all of it. What
  // sends messages leaves out the rest. The same on every rank.
  std::vector<int64_t> lengths = {};
  at::ScalarType dtype = at::kFloat;  // of the rows' elements
  std::string what;                   // in every rank's errors
  uint32_t unit = kNoUnit;
  const SendFunction* custom = nullptr;  // as GatherOptions has it
};

// An all-reduce, with the same bits on all ranks.
struct SumRowOptions {
  at::Tensor row;  // [elements], contiguous
  std::string what;
  uint32_t unit = kNoUnit;
  NoticeWords words = {};  // travel with it, for the caller to compare
};

// Owns its rows, and overwrites them. Destroying it takes part in what is left, and
// swallows errors.
class PendingReduction {
 public:
  virtual ~PendingReduction() = default;
  virtual int64_t staging_bytes() const = 0;
  // REQUIRES: called once. This rank's row summed over the ranks, [elements] of
  // sum_dtype(dtype) (sum_in_order.h), or the first of them, where a length was given.
  // Throws as Gather::wait().
  virtual at::Tensor wait() = 0;
  // REQUIRES: waited for. Of an all-reduce, what travelled with it, one per rank; this
  // rank's alone where nothing was announced, as on devices. Of a reduce-scatter, for
  // which callers give no words, of no meaning: some keep none.
  virtual std::vector<NoticeWords> words() const { return {}; }
};

}  // namespace fsdp::internal
