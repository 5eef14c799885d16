#include "tests/support/faulty_backend.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <unistd.h>

#include <thread>
#include <utility>
#include <vector>

namespace fsdp::testing {
namespace {

using c10d::Work;
using WorkPtr = c10::intrusive_ptr<Work>;
using Tensors = std::vector<at::Tensor>;

class FaultyBackend final : public c10d::Backend {
 public:
  FaultyBackend(c10::intrusive_ptr<c10d::Backend> inner, std::shared_ptr<Fault> fault)
      : Backend(inner->getRank(), inner->getSize()),
        inner_(std::move(inner)),
        fault_(std::move(fault)) {}

  const std::string getBackendName() const override { return "faulty"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return inner_->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override { inner_->setTimeout(timeout); }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    pass();
    return inner_->_allgather_base(output, input, options);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    pass();
    return inner_->_reduce_scatter_base(output, input, options);
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override {
    pass();
    return inner_->alltoall_base(output, input, output_splits, input_splits, options);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    pass();
    return inner_->allreduce(tensors, options);
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    pass();
    return inner_->broadcast(tensors, options);
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    if (to == (getRank() + 1) % getSize()) pass();
    return inner_->send(tensors, to, tag);
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    return inner_->recv(tensors, from, tag);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    pass();
    return inner_->barrier(options);
  }

 private:
  void pass() {
    if (fault_->issued++ != fault_->at) return;
    switch (fault_->kind) {
      case Fault::Kind::kNone:
        return;
      case Fault::Kind::kError:
        TORCH_CHECK(false, "injected failure");
      case Fault::Kind::kDelay:
        std::this_thread::sleep_for(fault_->delay);
        return;
      case Fault::Kind::kDeath:
        _exit(3);
    }
  }

  c10::intrusive_ptr<c10d::Backend> inner_;
  std::shared_ptr<Fault> fault_;
};

}  // namespace

void inject_fault(const c10::intrusive_ptr<c10d::ProcessGroup>& group, std::shared_ptr<Fault> fault,
                  std::chrono::milliseconds timeout) {
  auto inner = group->getBackend(c10::DeviceType::CPU);
  inner->setTimeout(timeout);
  group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM,
                    c10::make_intrusive<FaultyBackend>(std::move(inner), std::move(fault)));
}

}  // namespace fsdp::testing
