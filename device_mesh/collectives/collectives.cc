#include "device_mesh/collectives/collectives.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/headeronly/version.h>

#include <chrono>
#include <exception>
#include <thread>
#include <utility>

namespace fsdp::internal {
namespace {

using c10d::ProcessGroup;

// The collectives of one tensor on each side: LibTorch 2.15 renamed them.
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 15
constexpr auto kAllGather = &ProcessGroup::_allgather_base;
constexpr auto kReduceScatter = &ProcessGroup::_reduce_scatter_base;
constexpr auto kAllToAll = &ProcessGroup::alltoall_base;
#else
constexpr auto kAllGather = &ProcessGroup::all_gather_single;
constexpr auto kReduceScatter = &ProcessGroup::reduce_scatter_single;
constexpr auto kAllToAll = &ProcessGroup::all_to_all_single;
#endif

c10d::ReduceOp::RedOpType to_c10d(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return c10d::ReduceOp::SUM;
    case ReduceOp::kAvg:
      return c10d::ReduceOp::AVG;
    case ReduceOp::kMin:
      return c10d::ReduceOp::MIN;
    case ReduceOp::kMax:
      return c10d::ReduceOp::MAX;
    case ReduceOp::kProduct:
      return c10d::ReduceOp::PRODUCT;
  }
  TORCH_INTERNAL_ASSERT(false, "unknown ReduceOp ", static_cast<int>(op));
}

// An "nccl" group serves CPU tensors through gloo.
bool through_gloo(const Group& group, const at::Tensor& tensor) {
  const auto type = group->getBackendType();
  return tensor.is_cpu() && (type == ProcessGroup::GLOO || type == ProcessGroup::NCCL);
}

bool is_sum(ReduceOp op) { return op == ReduceOp::kSum || op == ReduceOp::kAvg; }

// What the backend throws at once is told by wait(), which knows the operation's name.
template <class Call>
Pending issue(const Group& group, const Call& call, std::function<void()> completion = {}) {
  try {
    return {group, call(), std::move(completion)};
  } catch (const std::exception&) {
    return {group, std::current_exception()};
  }
}

// Gloo's reduce-scatter is an all-reduce of a copy of the input, of which all but one row
// is thrown away. Exchanging the rows and adding them here moves half the bytes, needs no
// more memory, and always adds in the order of the ranks.
Pending reduce_scatter_by_exchange(const Group& group, at::Tensor output, at::Tensor input,
                                   ReduceOp op) {
  const int64_t size = group->getSize();
  at::Tensor rows = at::empty({size, output.numel()}, input.options());
  at::Tensor flat_input = input.view({size, -1});
  auto add_rows = [rows, output, size, op]() mutable {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    at::Tensor flat = output.view({-1});
    at::sum_out(flat, rows, /*dim=*/0);
    if (op == ReduceOp::kAvg) flat.div_(size);
  };
  std::vector<int64_t> equal_rows;
  return issue(
      group, [&] { return ((*group).*kAllToAll)(rows, flat_input, equal_rows, equal_rows, {}); },
      std::move(add_rows));
}

void check_operands(const Group& group, const char* operation, const at::Tensor& whole,
                    const at::Tensor& part) {
  TORCH_CHECK_VALUE(whole.is_contiguous() && part.is_contiguous(), operation,
                    ": tensors must be contiguous (rank ", group->getRank(), ")");
  TORCH_CHECK_VALUE(whole.numel() == part.numel() * group->getSize(), operation, ": ",
                    whole.numel(), " elements, expected ", group->getSize(), " ranks times ",
                    part.numel(), " (rank ", group->getRank(), ")");
  TORCH_CHECK_VALUE(whole.scalar_type() == part.scalar_type(), operation, ": dtypes ",
                    whole.scalar_type(), " and ", part.scalar_type(), " differ (rank ",
                    group->getRank(), ")");
}

std::string backend_message(const std::exception& error) {
  const auto* rich = dynamic_cast<const c10::Error*>(&error);
  return rich ? rich->what_without_backtrace() : error.what();
}

// Leaves word of this rank's failure in the group's store and lists the ranks that leave
// none within a second: as a rule those that never came to the collective. Empty when the
// store cannot be asked.
std::string silent_ranks(const Group& group) {
  constexpr auto kGrace = std::chrono::seconds(1);
  const auto key = [](int64_t rank) { return "failed/" + std::to_string(rank); };
  std::string silent;
  try {
    const auto store = group->getStore();
    if (!store) return "";
    store->set(key(group->getRank()), std::vector<uint8_t>{1});
    const auto deadline = std::chrono::steady_clock::now() + kGrace;
    for (int64_t rank = 0; rank < group->getSize(); ++rank) {
      while (!store->check({key(rank)}) && std::chrono::steady_clock::now() < deadline) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      }
      if (!store->check({key(rank)})) silent += (silent.empty() ? "" : ", ") + std::to_string(rank);
    }
  } catch (const std::exception&) {
    return "";  // The rank that serves the store is gone.
  }
  return silent;
}

[[noreturn]] void throw_failure(const Group& group, const std::string& what,
                                const std::string& reason) {
  const std::string silent = silent_ranks(group);
  C10_THROW_ERROR(DistBackendError,
                  c10::str(what, " failed on rank ", group->getRank(), " of ", group->getSize(),
                           " in group '", group->getGroupDesc(), "' (", group_backend(group), "): ",
                           reason, silent.empty() ? "" : ". No word from group ranks " + silent,
                           ". Other ranks may hang until their timeout"));
}

// Backends compare shapes, and Gloo has no complex numbers; the contract here is about
// elements.
at::Tensor elements(const at::Tensor& tensor) {
  const auto flat = tensor.view({-1});
  return flat.is_complex() ? at::view_as_real(flat).view({-1}) : flat;
}

}  // namespace

int64_t group_rank(const Group& group) { return group->getRank(); }
int64_t group_size(const Group& group) { return group->getSize(); }

std::string group_backend(const Group& group) {
  if (group->getBackendType() != ProcessGroup::CUSTOM) return group->getBackendName();
  return group->getDefaultBackend()->getBackendName();
}

Pending::Pending() = default;
Pending::Pending(Group group, c10::intrusive_ptr<c10d::Work> work, std::function<void()> completion)
    : group_(std::move(group)), work_(std::move(work)), completion_(std::move(completion)) {}
Pending::Pending(Pending&&) noexcept = default;

Pending& Pending::operator=(Pending&& other) noexcept {
  if (this == &other) return *this;
  this->~Pending();
  return *new (this) Pending(std::move(other));
}

Pending::~Pending() {
  if (!work_) return;
  try {
    work_->wait();
  } catch (const std::exception&) {
    // Abandoned: whoever cares about the outcome calls wait().
  }
}

Pending::Pending(Group group, std::exception_ptr failure)
    : group_(std::move(group)), failure_(std::move(failure)) {}

bool Pending::in_flight() const { return work_.defined() || failure_ != nullptr; }
void Pending::throw_if_not_issued(const std::string& what) {
  if (failure_) wait(what);
}

bool Pending::finished() const { return !work_ || work_->isCompleted(); }

void Pending::wait(const std::string& what) {
  if (!in_flight()) return;
  const Group group = std::move(group_);
  const auto work = std::move(work_);
  const auto failure = std::exchange(failure_, nullptr);
  const auto completion = std::move(completion_);
  bool finished = false;
  try {
    if (failure) std::rethrow_exception(failure);
    finished = work->wait();
  } catch (const std::exception& error) {
    throw_failure(group, what, backend_message(error));
  }
  if (!finished) throw_failure(group, what, "the collective was aborted");
  if (completion) completion();
}

Pending all_gather(const Group& group, at::Tensor output, at::Tensor input) {
  check_operands(group, "all_gather", output, input);
  if (input.numel() == 0) return {};
  at::Tensor flat_output = elements(output);
  at::Tensor flat_input = elements(input);
  return issue(group, [&] { return ((*group).*kAllGather)(flat_output, flat_input, {}); });
}

Pending reduce_scatter(const Group& group, at::Tensor output, at::Tensor input, ReduceOp op) {
  check_operands(group, "reduce_scatter", input, output);
  if (output.numel() == 0) return {};
  if (through_gloo(group, input) && is_sum(op) && input.is_floating_point()) {
    return reduce_scatter_by_exchange(group, std::move(output), std::move(input), op);
  }
  c10d::ReduceScatterOptions options;
  options.reduceOp = to_c10d(op);
  at::Tensor flat_output = output.view({-1});
  at::Tensor flat_input = input.view({-1});
  return issue(group, [&] { return ((*group).*kReduceScatter)(flat_output, flat_input, options); });
}

Pending all_reduce(const Group& group, at::Tensor tensor, ReduceOp op) {
  if (tensor.numel() == 0) return {};
  c10d::AllreduceOptions options;
  options.reduceOp = to_c10d(op);
  std::vector<at::Tensor> tensors{std::move(tensor)};
  return issue(group, [&] { return group->allreduce(tensors, options); });
}

Pending broadcast(const Group& group, at::Tensor tensor, int64_t root_group_rank) {
  TORCH_CHECK_VALUE(root_group_rank >= 0 && root_group_rank < group->getSize(), "broadcast: root ",
                    root_group_rank, ", expected 0 to ", group->getSize() - 1, " (rank ",
                    group->getRank(), ")");
  if (tensor.numel() == 0) return {};
  c10d::BroadcastOptions options;
  options.rootRank = root_group_rank;
  std::vector<at::Tensor> tensors{std::move(tensor)};
  return issue(group, [&] { return group->broadcast(tensors, options); });
}

Pending all_to_all(const Group& group, at::Tensor output, at::Tensor input) {
  TORCH_CHECK_VALUE(output.numel() == input.numel() && input.numel() % group->getSize() == 0,
                    "all_to_all: ", output.numel(), " and ", input.numel(),
                    " elements, expected equal multiples of the ", group->getSize(),
                    " ranks (rank ", group->getRank(), ")");
  TORCH_CHECK_VALUE(output.is_contiguous() && input.is_contiguous(),
                    "all_to_all: tensors must be contiguous (rank ", group->getRank(), ")");
  if (input.numel() == 0) return {};
  at::Tensor output_rows = output.view({group->getSize(), -1});
  at::Tensor input_rows = input.view({group->getSize(), -1});
  std::vector<int64_t> equal_rows;
  return issue(group, [&] {
    return ((*group).*kAllToAll)(output_rows, input_rows, equal_rows, equal_rows, {});
  });
}

Pending send_receive(const Group& group, at::Tensor received, int64_t from, at::Tensor sent,
                     int64_t to) {
  const int64_t size = group->getSize();
  TORCH_CHECK_VALUE(from >= 0 && from < size && to >= 0 && to < size, "send_receive: from ", from,
                    " to ", to, ", expected 0 to ", size - 1, " (rank ", group->getRank(), ")");
  TORCH_CHECK_VALUE(received.is_contiguous() && sent.is_contiguous(),
                    "send_receive: tensors must be contiguous (rank ", group->getRank(), ")");
  // Of the backends' operations only this one both sends and receives, and says when it
  // is finished.
  std::vector<int64_t> received_from(static_cast<size_t>(size), 0),
      sent_to(static_cast<size_t>(size), 0);
  received_from[static_cast<size_t>(from)] = received.numel();
  sent_to[static_cast<size_t>(to)] = sent.numel();
  at::Tensor flat_received = received.view({-1});
  at::Tensor flat_sent = sent.view({-1});
  return issue(group, [&] {
    return ((*group).*kAllToAll)(flat_received, flat_sent, received_from, sent_to, {});
  });
}

void barrier(const Group& group) {
  // Not ProcessGroup::barrier: it keeps its tensor in a function-level static, which
  // ranks that are threads would share.
  c10d::BarrierOptions options;
  if (group->getBackendType() == ProcessGroup::NCCL) {
    options.device = c10::impl::getDeviceGuardImpl(c10::kCUDA)->getDevice();
    options.device_ids = {options.device->index()};
  }
  Pending(group, group->getDefaultBackend()->barrier(options)).wait("barrier");
}

}  // namespace fsdp::internal
