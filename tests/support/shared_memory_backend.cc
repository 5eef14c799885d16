#include "tests/support/shared_memory_backend.h"

#include "tests/support/slowdown.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace fsdp::testing {
namespace {

constexpr auto kPeerTimeout = kSlowdown * std::chrono::seconds(20);
constexpr auto kGrace = kSlowdown * std::chrono::seconds(2);

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;
using Splits = std::vector<int64_t>;

// What one rank brings; for in-place collectives both tensors are one.
struct Operand {
  at::Tensor output, input;
  Splits output_splits = {}, input_splits = {};  // bytes per rank, of an all-to-all
};

using Operands = std::vector<Operand>;
using Exchange = std::function<void(Operands&)>;

struct Collective {
  explicit Collective(int64_t world) : operands(static_cast<size_t>(world)) {}
  Operands operands;
  size_t arrived = 0;
  bool done = false;
  std::string failure = {};
};

void copy(const Operand& to, int64_t to_byte, const Operand& from, int64_t from_byte,
          int64_t bytes) {
  const auto ends_within = [bytes](const at::Tensor& tensor, int64_t first) {
    return first + bytes <= static_cast<int64_t>(tensor.nbytes());
  };
  TORCH_CHECK(ends_within(to.output, to_byte) && ends_within(from.input, from_byte),
              "the ranks' sizes differ");
  if (bytes == 0) return;
  std::memmove(static_cast<char*>(to.output.data_ptr()) + to_byte,
               static_cast<const char*>(from.input.const_data_ptr()) + from_byte,
               static_cast<size_t>(bytes));
}

void concatenate(Operands& ranks) {
  for (auto& to : ranks) {
    int64_t offset = 0;
    for (const auto& from : ranks) {
      const auto bytes = static_cast<int64_t>(from.input.nbytes());
      copy(to, offset, from, 0, bytes);
      offset += bytes;
    }
  }
}

void exchange_parts(Operands& ranks) {
  for (size_t r = 0; r < ranks.size(); ++r) {
    int64_t to_byte = 0;
    for (size_t from = 0; from < ranks.size(); ++from) {
      const auto& splits = ranks[from].input_splits;
      int64_t from_byte = 0;
      for (size_t before = 0; before < r; ++before) from_byte += splits[before];
      TORCH_CHECK(splits[r] == ranks[r].output_splits[from], "the ranks' splits differ");
      copy(ranks[r], to_byte, ranks[from], from_byte, splits[r]);
      to_byte += splits[r];
    }
  }
}

at::Tensor combined(c10d::ReduceOp::RedOpType op, const at::Tensor& a, const at::Tensor& b) {
  switch (op) {
    case c10d::ReduceOp::SUM:
      return a + b;
    case c10d::ReduceOp::MIN:
      return at::minimum(a, b);
    case c10d::ReduceOp::MAX:
      return at::maximum(a, b);
    default:
      TORCH_CHECK(false, "all-reduce with operation ", static_cast<int>(op),
                  ": expected sum, minimum or maximum");
  }
}

void all_reduce(Operands& ranks, c10d::ReduceOp::RedOpType op) {
  auto result = ranks.front().input;
  for (size_t i = 1; i < ranks.size(); ++i) result = combined(op, result, ranks[i].input);
  const Operand from{result, result.clone()};
  for (auto& to : ranks) copy(to, 0, from, 0, static_cast<int64_t>(result.nbytes()));
}

// As bytes; no splits given: equal ones.
Splits bytes_of(const Splits& splits, const at::Tensor& tensor, int64_t world) {
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  if (splits.empty()) return Splits(static_cast<size_t>(world), bytes / world);
  const auto rows = std::max<int64_t>(tensor.size(0), 1);
  Splits result;
  for (const auto split : splits) result.push_back(split * (bytes / rows));
  return result;
}

}  // namespace

class SharedMemory {
 public:
  explicit SharedMemory(int64_t world) : world_(world) {}

  // Rank `rank` comes to its next collective, `sequence`. The last one to come runs it
  // for all.
  std::shared_ptr<Collective> arrive(int64_t rank, uint64_t sequence, Operand operand,
                                     const Exchange& exchange) {
    std::lock_guard lock(mutex_);
    auto& slot = coming_[sequence];
    if (!slot) slot = std::make_shared<Collective>(world_);
    const auto collective = slot;
    collective->operands[static_cast<size_t>(rank)] = std::move(operand);
    if (++collective->arrived < collective->operands.size()) return collective;
    coming_.erase(sequence);
    run(*collective, exchange);
    changed_.notify_all();
    return collective;
  }

  // A message from one rank to another; those of one tag arrive in order. A copy travels,
  // so that sending is done at once.
  void send(int64_t from, int64_t to, int tag, const at::Tensor& bytes) {
    std::lock_guard lock(mutex_);
    auto& mail = mail_[{from, to, tag}];
    if (mail.awaited.empty()) {
      mail.sent.push_back(bytes.clone());
      return;
    }
    deliver(*mail.awaited.front(), bytes);
    mail.awaited.pop_front();
    changed_.notify_all();
  }
  std::shared_ptr<Collective> receive(int64_t from, int64_t to, int tag, const at::Tensor& bytes) {
    std::lock_guard lock(mutex_);
    auto awaited = std::make_shared<Collective>(1);
    awaited->operands.front().output = bytes;
    auto& mail = mail_[{from, to, tag}];
    if (mail.sent.empty()) {
      mail.awaited.push_back(awaited);
    } else {
      deliver(*awaited, mail.sent.front());
      mail.sent.pop_front();
    }
    return awaited;
  }
  static std::shared_ptr<Collective> finished() {
    auto collective = std::make_shared<Collective>(0);
    collective->done = true;
    return collective;
  }

  bool is_done(const Collective& collective) {
    std::lock_guard lock(mutex_);
    return collective.done;
  }

  void wait(const Collective& collective) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, kPeerTimeout, [&] { return collective.done || somebody_left_; });
    // Who left may have done its part, and the others may be about to.
    changed_.wait_for(lock, kGrace, [&] { return collective.done; });
    TORCH_CHECK(collective.done, somebody_left_ ? "a rank left the group" : "timed out");
    TORCH_CHECK(collective.failure.empty(), collective.failure);
  }

  void leave() {
    std::lock_guard lock(mutex_);
    somebody_left_ = true;
    changed_.notify_all();
  }

 private:
  struct Mail {
    std::deque<at::Tensor> sent;
    std::deque<std::shared_ptr<Collective>> awaited;
  };

  static void deliver(Collective& awaited, const at::Tensor& bytes) {
    run(awaited, [&](Operands& receiver) {
      // As through Gloo, a message may be shorter than what is ready to receive it.
      copy({receiver.front().output, bytes}, 0, {bytes, bytes}, 0,
           static_cast<int64_t>(bytes.nbytes()));
    });
  }
  static void run(Collective& collective, const Exchange& exchange) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    try {
      exchange(collective.operands);
    } catch (const c10::Error& error) {
      collective.failure = error.what_without_backtrace();
    }
    collective.operands.clear();
    collective.done = true;
  }

  int64_t world_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uint64_t, std::shared_ptr<Collective>> coming_;  // by sequence: not everybody is there
  std::map<std::tuple<int64_t, int64_t, int>, Mail> mail_;  // by sender, receiver, tag
  bool somebody_left_ = false;
};

namespace {

class SharedMemoryWork final : public c10d::Work {
 public:
  SharedMemoryWork(std::shared_ptr<SharedMemory> memory, std::shared_ptr<Collective> collective)
      : memory_(std::move(memory)), collective_(std::move(collective)) {}

  bool isCompleted() override { return memory_->is_done(*collective_); }
  bool wait(std::chrono::milliseconds) override {
    memory_->wait(*collective_);
    return true;
  }

 private:
  std::shared_ptr<SharedMemory> memory_;
  std::shared_ptr<Collective> collective_;
};

class SharedMemoryBackend final : public c10d::Backend {
 public:
  SharedMemoryBackend(int rank, int size, std::shared_ptr<SharedMemory> memory)
      : Backend(rank, size), memory_(std::move(memory)) {}
  ~SharedMemoryBackend() override { memory_->leave(); }

  const std::string getBackendName() const override { return "shared memory"; }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions&) override {
    return come({output, input}, concatenate);
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, Splits& output_splits,
                        Splits& input_splits, const c10d::AllToAllOptions&) override {
    return come({output, input, bytes_of(output_splits, output, getSize()),
                 bytes_of(input_splits, input, getSize())},
                exchange_parts);
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    memory_->send(getRank(), to, tag, tensors.front());
    return c10::make_intrusive<SharedMemoryWork>(memory_, SharedMemory::finished());
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    return c10::make_intrusive<SharedMemoryWork>(
        memory_, memory_->receive(from, getRank(), tag, tensors.front()));
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    const c10d::ReduceOp::RedOpType op = options.reduceOp;
    return come({tensors.front(), tensors.front()},
                [op](Operands& ranks) { all_reduce(ranks, op); });
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const auto root = static_cast<size_t>(options.rootRank);
    return come({tensors.front(), tensors.front()}, [root](Operands& ranks) {
      for (auto& to : ranks) copy(to, 0, ranks[root], 0, static_cast<int64_t>(to.output.nbytes()));
    });
  }

 private:
  WorkPtr come(Operand operand, const Exchange& exchange) {
    return c10::make_intrusive<SharedMemoryWork>(
        memory_, memory_->arrive(getRank(), sequence_++, std::move(operand), exchange));
  }

  std::shared_ptr<SharedMemory> memory_;
  uint64_t sequence_ = 0;
};

}  // namespace

std::shared_ptr<SharedMemory> make_shared_memory(int64_t world) {
  return std::make_shared<SharedMemory>(world);
}

void use_shared_memory(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                       std::shared_ptr<SharedMemory> memory) {
  group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM,
                    c10::make_intrusive<SharedMemoryBackend>(group->getRank(), group->getSize(),
                                                             std::move(memory)));
}

}  // namespace fsdp::testing
