#include "device_mesh/process_groups/backend_table.h"

#include "device_mesh/internal/accelerator.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#ifdef USE_C10D_NCCL
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

#include <algorithm>
#include <cstring>
#include <deque>
#include <mutex>
#include <utility>

namespace fsdp::internal {
namespace {

// How the backends that come with the library are made, and connected: below. Null for
// NCCL where this build has none.
MakeBackend nccl_factory();
ConnectBackend nccl_connector();
BackendEntry fake_entry();

struct NamedBackend {
  std::string name;
  BackendEntry entry;
};

// In the order in which they were added; a deque, so that entries stay where they are.
struct BackendTable {
  std::mutex mutex;
  std::deque<NamedBackend> backends;
};

// Leaked: groups may be made and ended while the process ends.
BackendTable& backend_table() {
  static auto& table = *new BackendTable{
      .mutex = {},
      .backends = {
          {"gloo", {}},
          {"nccl",
           {.device_types = {c10::kCUDA}, .make = nccl_factory(), .connect = nccl_connector()}},
          {"fake", fake_entry()}}};
  return table;
}

// Not what reaches it through the Gloo beside it.
bool is_made_for(const BackendEntry& entry, c10::DeviceType type) {
  const auto& types = entry.device_types;
  return std::find(types.begin(), types.end(), type) != types.end();
}

}  // namespace

GroupMember::GroupMember() = default;
GroupMember::GroupMember(const GroupMember&) = default;
GroupMember::~GroupMember() = default;

bool BackendEntry::serves(c10::DeviceType type) const {
  return (type == c10::kCPU && has_gloo) || is_made_for(*this, type);
}

void add_backend(const std::string& name, BackendEntry entry) {
  TORCH_CHECK_VALUE(find_backend(name) == nullptr, "add_backend: '", name,
                    "' is taken; the backends are ", names_of_backends());
  auto& table = backend_table();
  const std::lock_guard lock(table.mutex);
  table.backends.push_back({name, std::move(entry)});
}

const BackendEntry* find_backend(const std::string& name) {
  auto& table = backend_table();
  const std::lock_guard lock(table.mutex);
  const auto found = std::find_if(table.backends.begin(), table.backends.end(),
                                  [&](const auto& backend) { return backend.name == name; });
  return found != table.backends.end() ? &found->entry : nullptr;
}

std::string names_of_backends() {
  auto& table = backend_table();
  const std::lock_guard lock(table.mutex);
  std::string names;
  for (size_t i = 0; i < table.backends.size(); ++i) {
    if (i > 0) names += i + 1 == table.backends.size() ? " and " : ", ";
    names += "'" + table.backends[i].name + "'";
  }
  return names;
}

std::string backend_for(c10::DeviceType type) {
  auto& table = backend_table();
  const std::lock_guard lock(table.mutex);
  for (const auto& [name, entry] : table.backends) {
    if (entry.has_gloo && entry.is_in_this_build() && is_made_for(entry, type)) return name;
  }
  return "gloo";
}

namespace {

// The only place that includes what needs CUDA's headers.
#ifdef USE_C10D_NCCL
MakeBackend nccl_factory() {
  return [](const GroupMember& member) {
    auto options = c10d::ProcessGroupNCCL::Options::create();
    // Kernels of collectives get their place beside those that fill the device.
    options->is_high_priority_stream = true;
    options->timeout = member.timeout;
    options->group_name = member.name;
    options->global_ranks_in_group = member.global_ranks;
    auto store = c10::make_intrusive<c10d::PrefixStore>("nccl", member.store);
    return c10::make_intrusive<c10d::ProcessGroupNCCL>(store, member.rank, member.size, options);
  };
}

// Another communicator would take the memory of one more.
ConnectBackend nccl_connector() {
  return [](c10d::Backend& backend, c10::Device device) {
    auto& nccl = dynamic_cast<c10d::ProcessGroupNCCL&>(backend);
    if (!nccl.isInitialized()) nccl.eagerConnectSingleDevice(device);
  };
}
#else
MakeBackend nccl_factory() { return {}; }
ConnectBackend nccl_connector() { return {}; }
#endif

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

// A c10d backend that talks to nobody and completes every collective at once, to stand
// for one rank of any world inside one process. It behaves as if every other rank held
// the same data as this one would send it:
//
//   all-gather     every slot of the output is this rank's input
//   reduction      the input is kept: sum, average, minimum, maximum and product all return it
//   reduce-scatter this rank's row of the input
//   broadcast      unchanged; all-to-all copies the input to the output
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
    const int64_t sent = std::min(output.numel(), input.numel());
    output.view({-1}).narrow(0, 0, sent).copy_(input.view({-1}).narrow(0, 0, sent));
    output.view({-1}).narrow(0, sent, output.numel() - sent).zero_();
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

c10::intrusive_ptr<c10d::Backend> make_fake_backend(const GroupMember& member) {
  auto options = c10::make_intrusive<c10d::Backend::Options>("fake", member.timeout);
  options->global_ranks_in_group = member.global_ranks;
  return c10::make_intrusive<FakeBackend>(member.rank, member.size, std::move(options));
}

BackendEntry fake_entry() {
  auto types = accelerator_types();
  types.insert(types.begin(), c10::kCPU);
  return {.device_types = std::move(types), .make = make_fake_backend, .has_gloo = false};
}

}  // namespace
}  // namespace fsdp::internal
