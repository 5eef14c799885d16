// What the collectives of a group (collectives.h) are given, and what they bring.
//
// Fields that operations have in common: `what` names it in errors, "all-gather of unit
// 'blocks.0'"; `unit` tells apart operations of one size, a unit's number or, where there
// is none, a hash of `what`; `words` travel with it, for the caller to compare.
#pragma once

#include "device_mesh/collectives/notice.h"

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace c10d {
class Work;
}

namespace fsdp::internal {

// How values of several ranks become one.
enum class ReduceOp { kSum, kMin, kMax, kProduct };

// What moves the bytes of a collective in the backend's place (fsdp::Communicate): from
// `input` into `output`, both flat; finished when the work is, null for at once.
using SendFunction = std::function<c10::intrusive_ptr<c10d::Work>(const at::Tensor& output,
                                                                  const at::Tensor& input)>;

// What the rows of a sum hold: elements of `dtype`, or codes of such.
struct Summands {
  struct Codes {
    std::string name;  // the same on every rank
    // The values of a row: [elements] of sum_dtype(dtype), memory of its own.
    std::function<at::Tensor(const at::Tensor& row)> decode;
  };
  // A constructor, since GCC 12 takes an aggregate within the options below for
  // uninitialised.
  explicit Summands(at::ScalarType dtype = at::kFloat, std::shared_ptr<const Codes> codes = nullptr)
      : dtype(dtype), codes(std::move(codes)) {}

  at::ScalarType dtype;
  std::shared_ptr<const Codes> codes;  // null: there are none
};

struct AllGatherOptions {
  // Of all_gather(): group size * input.numel() elements, rank-major.
  at::Tensor output = {};
  at::Tensor input;  // of the same size on every rank; of start(): uint8 [bytes]
  // Of start(): the bytes at the beginning of each rank's row that are to be read; none:
  // all of it. What sends messages leaves out the rest. The same on every rank.
  std::vector<int64_t> lengths = {};
  std::string what;
  std::optional<uint32_t> unit = {};
  NoticeWords words = {};
  // What sends the row in the backend's place, while the engine announces and compares as
  // ever; null: the backend. Outlives the call.
  const SendFunction* custom = nullptr;
};

struct ReduceScatterOptions {
  at::Tensor output = {};  // of reduce_scatter(): the reduction of row `rank`
  // Group size rows; row r goes to rank r. Of start(): uint8 [ranks, row bytes], each row
  // contiguous, overwritten.
  at::Tensor input;
  std::vector<int64_t> lengths = {};  // as all-gathers have them
  Summands summands = Summands();     // of start()
  std::string what;
  ReduceOp op = ReduceOp::kSum;  // start() takes this one only
  std::optional<uint32_t> unit = {};
  NoticeWords words = {};
  const SendFunction* custom = nullptr;  // as all-gathers have it
};

struct AllReduceOptions {
  at::Tensor tensor;  // in place; of start(): [elements], which it owns
  std::string what;
  ReduceOp op = ReduceOp::kSum;  // start() takes this one only
  std::optional<uint32_t> unit = {};
  NoticeWords words = {};
};

struct BroadcastOptions {
  at::Tensor tensor;  // in place
  std::string what;
  int64_t root = 0;  // group rank
  NoticeWords words = {};
};

struct AllToAllOptions {
  at::Tensor output = {};  // of all_to_all(): row r comes from rank r; as `input`
  // Row r goes to rank r; rows of one size. Of start(), where each pair of ranks has a
  // size of its own, which may be none: uint8, what goes to rank 0, to rank 1, ...
  at::Tensor input;
  std::vector<int64_t> input_split_sizes = {};   // of start(): bytes of it for each rank
  std::vector<int64_t> output_split_sizes = {};  // of start(): bytes that come from each
  std::string what;
  NoticeWords words = {};  // of all_to_all()
};

struct RowsOptions {
  at::Tensor row;  // of the same shape and dtype on every rank
  std::string what;
  // What all ranks must be in, by name, where their `what` may differ; empty: rows of one
  // size meet.
  std::string call = {};
};

// The rows of all ranks. A value; keeps them readable.
class GatheredRows {
 public:
  GatheredRows() = default;
  // `keep` holds the memory of the rows.
  GatheredRows(std::vector<const char*> rows, std::vector<NoticeWords> words,
               std::shared_ptr<const void> keep)
      : rows_(std::move(rows)), words_(std::move(words)), keep_(std::move(keep)) {}

  // What that rank of the group sent: its first lengths[rank] bytes, where lengths were
  // given (AllGatherOptions).
  const char* row(int64_t rank) const { return rows_[static_cast<size_t>(rank)]; }
  // One per rank; empty where notices are not compared.
  const std::vector<NoticeWords>& words() const { return words_; }

 private:
  std::vector<const char*> rows_;
  std::vector<NoticeWords> words_;
  std::shared_ptr<const void> keep_;
};

// The type in which values of `dtype` are added up: float for Half and BFloat16, else
// `dtype`. Local.
at::ScalarType sum_dtype(at::ScalarType dtype);
// The rows (uint8, of one size) added one after another, in the order of the ranks:
// [elements] of sum_dtype(summands.dtype). Whatever this process adds up it adds up so,
// which gives the same bits everywhere. Local.
at::Tensor sum_in_order(const std::vector<at::Tensor>& rows, const Summands& summands);

// What a reduce-scatter or an all-reduce gives this rank.
struct SummedRow {
  at::Tensor row;                  // [elements] of sum_dtype(dtype); the first of them,
                                   // where a length was given
  std::vector<NoticeWords> words;  // of the ranks; of this one alone on devices
};

// A collective that was issued and has not been waited for. Destroying it waits, since
// the other ranks count on this one, and swallows errors.
template <class Result>
class InFlight {
 public:
  // `finish` waits and gives the result; what it holds lives as long as this. Called
  // once.
  explicit InFlight(std::function<Result()> finish, int64_t staging_bytes = 0)
      : finish_(std::move(finish)), staging_bytes_(staging_bytes) {}
  InFlight(InFlight&& other) noexcept
      : finish_(std::exchange(other.finish_, nullptr)),
        staging_bytes_(other.staging_bytes_),
        is_finished_(std::exchange(other.is_finished_, true)) {}
  InFlight& operator=(InFlight&&) = delete;
  ~InFlight() {
    try {
      if (!is_finished_) wait();
    } catch (const std::exception&) {
      // The group's next user is told.
    }
  }

  // Held by it, and by the rows that it brings.
  int64_t staging_bytes() const { return staging_bytes_; }
  // REQUIRES: called once. Throws what failed (DistBackendError naming operation and
  // ranks) or, where ranks issued different operations, an error that names both.
  Result wait() {
    is_finished_ = true;
    return finish_();
  }

 private:
  std::function<Result()> finish_;
  int64_t staging_bytes_;
  bool is_finished_ = false;
};

}  // namespace fsdp::internal
