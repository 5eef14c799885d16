// The collectives the upper layers use, on plain contiguous tensors over one c10d group.
// The only file that knows ProcessGroup's call conventions, so that nobody else includes
// c10d's heavy headers.
//
// Every function here is collective over `group`: all its ranks must call in the same
// order with the same sizes. Each returns at once with a Pending; the tensors must stay
// alive and untouched until wait() returns. On CUDA the collective is ordered after the
// work on the current stream, and wait() makes the current stream wait without blocking
// the host.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <string>

namespace c10d {
class ProcessGroup;
class Work;
}  // namespace c10d

namespace fsdp::internal {

enum class ReduceOp { kSum, kAvg, kMin, kMax, kProduct };

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

int64_t group_rank(const Group& group);
int64_t group_size(const Group& group);
std::string group_backend(const Group& group);  // "gloo", "nccl", "fake", ...

// A collective in flight. Destroying one that was not waited for waits, and swallows its
// error.
class Pending {
 public:
  Pending();
  // `completion`, if any, runs in the first successful wait(), after the backend's work.
  Pending(Group group, c10::intrusive_ptr<c10d::Work> work, std::function<void()> completion = {});
  Pending(Pending&&) noexcept;
  Pending& operator=(Pending&&) noexcept;
  ~Pending();
  // A collective that could not even be issued: wait() tells.
  Pending(Group group, std::exception_ptr failure);
  bool in_flight() const;
  // What wait() would throw for a collective that could not be issued; otherwise nothing.
  void throw_if_not_issued(const std::string& what);
  // wait() would not block: nothing is in flight, or the backend has finished.
  bool finished() const;
  // Throws c10::DistBackendError that carries `what` (operation and unit), the rank, the
  // group's description, the backend's text and the ranks that did not report a failure
  // within a second, when the collective failed or timed out. Idempotent.
  void wait(const std::string& what);

 private:
  Group group_;
  c10::intrusive_ptr<c10d::Work> work_;
  std::exception_ptr failure_;
  std::function<void()> completion_;
};

// output: group_size * input.numel(), rank-major.
Pending all_gather(const Group& group, at::Tensor output, at::Tensor input);
// input: group_size rows; output: one row, the reduction over ranks of row `rank`.
Pending reduce_scatter(const Group& group, at::Tensor output, at::Tensor input, ReduceOp op);
Pending all_reduce(const Group& group, at::Tensor tensor, ReduceOp op);
Pending broadcast(const Group& group, at::Tensor tensor, int64_t root_group_rank);
// Row i of `input` goes to rank i; row i of `output` comes from rank i. Equal rows.
Pending all_to_all(const Group& group, at::Tensor output, at::Tensor input);
// `sent` goes to rank `to`; `received` comes from rank `from`, and is as large as what
// that rank sends here. Contiguous.
Pending send_receive(const Group& group, at::Tensor received, int64_t from, at::Tensor sent,
                     int64_t to);
void barrier(const Group& group);

}  // namespace fsdp::internal
