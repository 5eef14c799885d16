#include "device_mesh/process_groups/backend_table.h"
#include "tests/simulated_accelerator/current_stream.h"
#include "tests/simulated_accelerator/exchange.h"
#include "tests/simulated_accelerator/host_view.h"
#include "tests/simulated_accelerator/machine.h"
#include "tests/simulated_accelerator/run.h"
#include "tests/simulated_accelerator/world.h"
#include "tests/support/thread_ranks.h"

#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace fsdp::testing::simulated {
namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class DeviceWork final : public c10d::Work {
 public:
  DeviceWork(World::Wait wait, const c10::Stream& stream, Tensors kept)
      : wait_(wait), device_(stream.device()), kept_(std::move(kept)) {
    done_.record(stream);
  }

  bool isCompleted() override { return done_.query(); }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    if (wait_ == World::Wait::kMakesStreamWait) {
      done_.block(stream_of(current_queue(device_.index()), device_.index()));
    }
    kept_.clear();
  }

 private:
  World::Wait wait_;
  c10::Device device_;
  Tensors kept_;
  c10::Event done_{kDeviceType};
};

// Whom a rank meets: the others of its world, or only itself.
class Peers {
 public:
  virtual ~Peers() = default;
  virtual World::Wait wait() const = 0;
  virtual std::shared_ptr<Rendezvous> meet(const Membership& member, const World::Issue& issue,
                                           const Operand& operand, const Exchange& exchange) = 0;
};

class ThreadPeers final : public Peers {
 public:
  explicit ThreadPeers(std::shared_ptr<World> world) : world_(std::move(world)) {}
  World::Wait wait() const override { return world_->wait(); }
  std::shared_ptr<Rendezvous> meet(const Membership& member, const World::Issue& issue,
                                   const Operand& operand, const Exchange& exchange) override {
    auto rendezvous = world_->meet(member, issue, exchange);
    rendezvous->bring(static_cast<size_t>(member.rank), operand);
    return rendezvous;
  }

 private:
  std::shared_ptr<World> world_;
};

class NoPeers final : public Peers {
 public:
  explicit NoPeers(World::Wait wait) : wait_(wait) {}
  World::Wait wait() const override { return wait_; }
  std::shared_ptr<Rendezvous> meet(const Membership& member, const World::Issue&,
                                   const Operand& operand, const Exchange& exchange) override {
    auto sent = operand;
    sent.output = nullptr;
    Operands operands(static_cast<size_t>(member.size), sent);
    operands.at(static_cast<size_t>(member.rank)) = operand;
    return std::make_shared<Rendezvous>(1, std::move(operands), exchange);
  }

 private:
  World::Wait wait_;
};

// As bytes; no splits given: equal ones.
std::vector<size_t> bytes_of(const std::vector<int64_t>& splits, const at::Tensor& tensor,
                             int world) {
  const auto ranks = static_cast<size_t>(world);
  if (splits.empty()) return std::vector<size_t>(ranks, tensor.nbytes() / ranks);
  const auto rows = std::max<int64_t>(tensor.size(0), 1);
  std::vector<size_t> bytes;
  for (const auto split : splits) {
    bytes.push_back(static_cast<size_t>(split) * (tensor.nbytes() / static_cast<size_t>(rows)));
  }
  return bytes;
}

// Of contiguous tensors, as NCCL's are.
Operand operand_of(const at::Tensor& input, const at::Tensor& output) {
  TORCH_CHECK(is_on_device(input) && is_on_device(output) && input.is_contiguous() &&
                  output.is_contiguous(),
              "simulated accelerator: a collective takes contiguous tensors on the device");
  return {static_cast<const char*>(input.const_data_ptr()), input.nbytes(),
          static_cast<char*>(output.data_ptr()), output.nbytes()};
}

class DeviceBackend final : public c10d::Backend {
 public:
  DeviceBackend(std::unique_ptr<Peers> peers, Membership member, std::string unique_name)
      : Backend(member.rank, member.size),
        peers_(std::move(peers)),
        member_(std::move(member)),
        unique_name_(std::move(unique_name)),
        options_(c10::make_intrusive<Options>(getBackendName(), member_.timeout)) {
    options_->global_ranks_in_group = member_.global_ranks;
  }

  const std::string getBackendName() const override { return member_.backend; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  void setSequenceNumberForGroup() override {}  // counted from the start
  uint64_t getSequenceNumberForGroup() override { return issued_; }
  void shutdown() override {}  // has no threads or connections of its own
  void connect(World& world) {
    if (!stream_ && !std::exchange(is_connected_, true)) world.connected(member_);
  }
  void waitForPendingWorks() override {}  // streams are the device's, which finishes them

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    return issue("all-gather", {input, output}, options.asyncOp, gather_rows());
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    return issue("reduce-scatter", {input, output}, options.asyncOp,
                 reduce_rows(output.scalar_type(), options.reduceOp));
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    const auto& tensor = tensors.at(0);
    return issue("all-reduce", {tensor, tensor}, options.asyncOp,
                 reduce_whole(tensor.scalar_type(), options.reduceOp));
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const auto& tensor = tensors.at(0);
    return issue("broadcast", {tensor, tensor}, options.asyncOp,
                 copy_from_rank(static_cast<size_t>(options.rootRank)));
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>&,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override {
    return issue("all-to-all", {input, output, bytes_of(input_splits, input, getSize())},
                 options.asyncOp, exchange_parts());
  }
  WorkPtr barrier(const c10d::BarrierOptions&) override {
    const c10::Device device(kDeviceType, current_device());
    Tensors byte = {at::zeros({1}, at::TensorOptions(at::kByte).device(device))};
    auto work = allreduce(byte, {});
    work->wait();
    Machine::instance().host_waits_for_stream(current_queue(device.index()), "barrier");
    return work;
  }

 private:
  struct Parts {
    at::Tensor input, output;
    std::vector<size_t> input_splits = {};
  };

  WorkPtr issue(const std::string& kind, const Parts& tensors, bool is_async,
                const Exchange& exchange);
  c10::Stream own_stream(c10::Device device);

  std::unique_ptr<Peers> peers_;
  Membership member_;
  std::string unique_name_;
  c10::intrusive_ptr<Options> options_;
  uint64_t issued_ = 0;
  bool is_connected_ = false;
  std::optional<c10::Stream> stream_;  // made with the first collective, as a communicator is
};

c10::Stream DeviceBackend::own_stream(c10::Device device) {
  if (!stream_)
    stream_ = stream_of(Machine::instance().open_stream(device.index()), device.index());
  return *stream_;
}

WorkPtr DeviceBackend::issue(const std::string& kind, const Parts& tensors, bool is_async,
                             const Exchange& exchange) {
  const auto device = tensors.output.device();
  const c10::DeviceGuard guard(device);
  auto operand = operand_of(tensors.input, tensors.output);
  operand.input_splits = tensors.input_splits;
  const auto current = stream_of(current_queue(device.index()), device.index());
  const auto runs_on = is_async ? own_stream(device) : current;
  c10::Event ready(kDeviceType);
  ready.record(current);
  ready.block(runs_on);
  auto rendezvous = peers_->meet(member_, {unique_name_, issued_++, kind, tensors.output.nbytes()},
                                 operand, exchange);
  auto accesses = reads(tensors.input);
  add(accesses, writes(tensors.output));
  Machine::instance().take_part(queue_of(runs_on),
                                {kind, unique_name_, std::move(accesses), std::move(rendezvous)});
  const Tensors kept = is_async ? Tensors{tensors.input, tensors.output} : Tensors{};
  return c10::make_intrusive<DeviceWork>(peers_->wait(), runs_on, kept);
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_backend(std::shared_ptr<World> world, Membership member) {
  auto name = world->unique_name(member);
  return c10::make_intrusive<DeviceBackend>(std::make_unique<ThreadPeers>(std::move(world)),
                                            std::move(member), std::move(name));
}

c10::intrusive_ptr<c10d::Backend> make_lone_backend(Membership member, World::Wait wait) {
  auto name = member.name;
  return c10::make_intrusive<DeviceBackend>(std::make_unique<NoPeers>(wait), std::move(member),
                                            std::move(name));
}

std::string backend_of(const std::shared_ptr<World>& world) {
  static std::atomic<int> worlds = 0;
  const auto name = "simulated " + std::to_string(++worlds);
  const auto make = [world, name](const internal::GroupMember& member) {
    return make_backend(
        world, {member.name, member.rank, member.size, member.global_ranks, member.timeout, name});
  };
  const auto connect = [world](c10d::Backend& backend, c10::Device) {
    dynamic_cast<DeviceBackend&>(backend).connect(*world);
  };
  internal::add_backend(name, {.device_types = {kDeviceType}, .make = make, .connect = connect});
  return name;
}

void run_ranks_on_devices(int64_t ranks, std::shared_ptr<World> world,
                          const std::function<void(int64_t rank)>& body) {
  run_ranks_over(backend_of(world), ranks, [&](int64_t rank) {
    const c10::DeviceGuard guard(device(rank));
    body(rank);
  });
}

void serve_device(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                  std::shared_ptr<World> world) {
  const auto options = group->getDefaultBackend()->getBackendOptions();
  auto backend =
      make_backend(std::move(world), {group->getGroupName(), group->getRank(), group->getSize(),
                                      options->global_ranks_in_group, options->timeout});
  group->setBackend(kDeviceType, c10d::ProcessGroup::BackendType::NCCL, backend);
}

}  // namespace fsdp::testing::simulated
