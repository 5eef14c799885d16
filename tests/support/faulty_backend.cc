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

// A message, which Gloo would wait for as long as its context was made to, whatever
// setTimeout() says.
class LimitedMessage final : public Work {
 public:
  LimitedMessage(WorkPtr inner, std::chrono::milliseconds timeout)
      : inner_(std::move(inner)), timeout_(timeout) {}
  bool isCompleted() override { return inner_->isCompleted(); }
  bool wait(std::chrono::milliseconds) override { return inner_->wait(timeout_); }
  void abort() override { inner_->abort(); }

 private:
  WorkPtr inner_;
  std::chrono::milliseconds timeout_;
};

class FaultyBackend final : public c10d::Backend {
 public:
  FaultyBackend(c10::intrusive_ptr<c10d::Backend> inner, std::shared_ptr<Fault> fault,
                std::chrono::milliseconds timeout)
      : Backend(inner->getRank(), inner->getSize()),
        inner_(std::move(inner)),
        fault_(std::move(fault)),
        timeout_(timeout) {}

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
    return limited(inner_->send(tensors, to, tag));
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    return limited(inner_->recv(tensors, from, tag));
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    pass();
    return inner_->barrier(options);
  }

 private:
  WorkPtr limited(WorkPtr message) const {
    return c10::make_intrusive<LimitedMessage>(std::move(message), timeout_);
  }
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
  std::chrono::milliseconds timeout_;
};

}  // namespace

void inject_fault(const c10::intrusive_ptr<c10d::ProcessGroup>& group, std::shared_ptr<Fault> fault,
                  std::chrono::milliseconds timeout) {
  auto inner = group->getBackend(c10::DeviceType::CPU);
  inner->setTimeout(timeout);
  group->setBackend(
      c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM,
      c10::make_intrusive<FaultyBackend>(std::move(inner), std::move(fault), timeout));
}

}  // namespace fsdp::testing
