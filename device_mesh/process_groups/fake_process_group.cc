#include "device_mesh/process_groups/fake_process_group.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cstring>
#include <utility>

namespace fsdp::internal {
namespace {

using c10d::OpType;
using c10d::Work;
using Tensors = std::vector<at::Tensor>;

class FinishedWork : public Work {
 public:
  FinishedWork(int rank, OpType operation, Tensors result)
      : Work(rank, operation), result_(std::move(result)) {
    finish();
  }

  bool wait(std::chrono::milliseconds) override { return true; }
  Tensors result() override { return result_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(result_));
    return future;
  }

 private:
  Tensors result_;
};

// Row `index` of `rows`, which has the bytes of `row` as often as there are ranks, as
// memory of the host, or null. Operators would take longer than all else that is done
// here, and benchmarks of the host's time run on fake worlds.
char* host_row(const at::Tensor& rows, const at::Tensor& row, int64_t index) {
  if (!rows.is_cpu() || !rows.is_contiguous() || !row.is_contiguous()) return nullptr;
  return static_cast<char*>(rows.data_ptr()) + index * static_cast<int64_t>(row.nbytes());
}

// Each row as `row`, which may be row `index`. One launch on a device where it is not; in
// no case other memory, which a true backend does not take either.
void fill_rows(const at::Tensor& rows, const at::Tensor& row, int64_t index) {
  if (!rows.is_alias_of(row)) {
    rows.copy_(row);
    return;
  }
  const int64_t after = rows.size(0) - index - 1;
  if (index > 0) rows.narrow(0, 0, index).copy_(row);
  if (after > 0) rows.narrow(0, index + 1, after).copy_(row);
}

class FakeBackend : public c10d::Backend {
 public:
  FakeBackend(int rank, int size, c10::intrusive_ptr<Options> options)
      : Backend(rank, size), options_(std::move(options)) {}

  const std::string getBackendName() const override { return "fake"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }

  c10::intrusive_ptr<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions&) override {
    return finished(OpType::BROADCAST, tensors);
  }

  c10::intrusive_ptr<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions&) override {
    return finished(OpType::ALLREDUCE, tensors);
  }

  c10::intrusive_ptr<Work> reduce(Tensors& tensors, const c10d::ReduceOptions&) override {
    return finished(OpType::REDUCE, tensors);
  }

  c10::intrusive_ptr<Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::AllgatherOptions&) override {
    if (input.numel() == 0) return finished(OpType::_ALLGATHER_BASE, {output});
    if (host_row(output, input, 0) == nullptr) {
      fill_rows(output.view({getSize(), -1}), input.reshape({1, -1}), getRank());
    } else {
      for (int64_t i = 0; i < getSize(); ++i)
        std::memcpy(host_row(output, input, i), input.const_data_ptr(), input.nbytes());
    }
    return finished(OpType::_ALLGATHER_BASE, {output});
  }

  c10::intrusive_ptr<Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                     const c10d::AllgatherOptions&) override {
    for (auto& slot : outputs.at(0)) slot.copy_(inputs.at(0));
    return finished(OpType::ALLGATHER, outputs.at(0));
  }

  c10::intrusive_ptr<Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::ReduceScatterOptions&) override {
    if (output.numel() == 0) return finished(OpType::_REDUCE_SCATTER_BASE, {output});
    if (const auto* const row = host_row(input, output, getRank())) {
      std::memcpy(output.mutable_data_ptr(), row, output.nbytes());
    } else {
      output.view({-1}).copy_(input.view({getSize(), -1}).select(0, getRank()));
    }
    return finished(OpType::_REDUCE_SCATTER_BASE, {output});
  }

  c10::intrusive_ptr<Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                         std::vector<int64_t>&, std::vector<int64_t>&,
                                         const c10d::AllToAllOptions&) override {
    output.view({-1}).copy_(input.view({-1}));
    return finished(OpType::ALLTOALL_BASE, {output});
  }

  c10::intrusive_ptr<Work> barrier(const c10d::BarrierOptions&) override {
    return finished(OpType::BARRIER, {});
  }

 private:
  c10::intrusive_ptr<Work> finished(OpType operation, Tensors result) {
    return c10::make_intrusive<FinishedWork>(getRank(), operation, std::move(result));
  }

  c10::intrusive_ptr<Options> options_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_fake_backend(int64_t rank, int64_t size,
                                                    std::chrono::milliseconds timeout,
                                                    std::vector<uint64_t> global_ranks) {
  auto options = c10::make_intrusive<c10d::Backend::Options>("fake", timeout);
  options->global_ranks_in_group = std::move(global_ranks);
  return c10::make_intrusive<FakeBackend>(static_cast<int>(rank), static_cast<int>(size),
                                          std::move(options));
}

}  // namespace fsdp::internal
