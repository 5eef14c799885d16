#include "tests/support/one_sided_transport.h"

#include "device_mesh/internal/weak_registry.h"
#include "tests/support/slowdown.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::testing {
namespace {

using internal::GatheredRows;
using internal::Issue;

constexpr auto kTimeout = kSlowdown * std::chrono::seconds(20);
constexpr uint64_t kLeft = std::numeric_limits<uint64_t>::max();

// One reduction: what each rank brought.
struct Meeting {
  std::vector<std::vector<at::Tensor>> rows;  // by sender, then receiver; empty: not come yet
  std::vector<std::string> operations;
  size_t left = 0;  // ranks that need nothing of it any more
};

// What the ranks of one mesh dimension share.
class SharedShards {
 public:
  explicit SharedShards(int64_t size)
      : phases_(static_cast<size_t>(size), 1), shards_(phases_.size()) {}

  // The n-th shard memory of every rank belongs together.
  size_t add_shards(int64_t rank, const at::Tensor& memory) {
    std::lock_guard lock(mutex_);
    auto& own = shards_[static_cast<size_t>(rank)];
    own.push_back(memory.storage());
    changed_.notify_all();
    return own.size() - 1;
  }

  // Odd phases write, even ones read.
  void begin_writing(int64_t rank) { enter_phase(rank, 1, /*wait=*/true); }
  void begin_reading(int64_t rank) { enter_phase(rank, 0, /*wait=*/true); }
  void end_writing(int64_t rank) { enter_phase(rank, 0, /*wait=*/false); }
  void leave(int64_t rank) {
    std::lock_guard lock(mutex_);
    phases_[static_cast<size_t>(rank)] = kLeft;
    changed_.notify_all();
  }

  std::vector<c10::Storage> shards(size_t number, const std::string& what) {
    std::unique_lock lock(mutex_);
    await(lock, what, [&] {
      return std::all_of(shards_.begin(), shards_.end(),
                         [number](const auto& of_rank) { return of_rank.size() > number; });
    });
    std::vector<c10::Storage> storages;
    for (const auto& of_rank : shards_) storages.push_back(of_rank[number]);
    return storages;
  }

  void come(int64_t rank, uint64_t sequence, std::vector<at::Tensor> rows, std::string operation) {
    std::lock_guard lock(mutex_);
    auto& meeting = meetings_[sequence];
    meeting.rows.resize(phases_.size());
    meeting.operations.resize(phases_.size());
    meeting.rows[static_cast<size_t>(rank)] = std::move(rows);
    meeting.operations[static_cast<size_t>(rank)] = std::move(operation);
    changed_.notify_all();
  }
  Meeting meet(uint64_t sequence, const std::string& what) {
    std::unique_lock lock(mutex_);
    await(lock, what, [&] {
      const auto& rows = meetings_[sequence].rows;
      return std::none_of(rows.begin(), rows.end(), [](const auto& row) { return row.empty(); });
    });
    return meetings_[sequence];
  }
  // The last rank to go forgets the meeting.
  void leave_meeting(uint64_t sequence) {
    std::lock_guard lock(mutex_);
    if (++meetings_[sequence].left == phases_.size()) meetings_.erase(sequence);
  }

 private:
  void enter_phase(int64_t rank, uint64_t parity, bool wait) {
    std::unique_lock lock(mutex_);
    auto& own = phases_[static_cast<size_t>(rank)];
    if (own % 2 != parity) ++own;
    const auto phase = own;
    changed_.notify_all();
    if (!wait) return;
    await(lock, parity == 1 ? "a write to shards" : "a gather", [&] {
      return std::all_of(phases_.begin(), phases_.end(),
                         [phase](uint64_t other) { return other >= phase; });
    });
  }

  template <class Condition>
  void await(std::unique_lock<std::mutex>& lock, const std::string& what, Condition condition) {
    TORCH_CHECK(changed_.wait_for(lock, kTimeout, condition), what,
                ": the other ranks did not come");
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<uint64_t> phases_;                   // by rank
  std::vector<std::vector<c10::Storage>> shards_;  // kept until all ranks have left
  std::map<uint64_t, Meeting> meetings_;
};

// The ranks of a group find one another by the group's name in the store they share; the
// n-th transports of every rank belong together.
std::shared_ptr<SharedShards> meet_in(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  struct Generations {
    c10::intrusive_ptr<c10d::Store> store;  // alive, so that no other has its address
    std::map<int64_t, size_t> joined;       // by rank: how often
    internal::WeakRegistry<size_t, SharedShards> shared;
  };
  static std::mutex mutex;
  static auto& groups = *new std::map<std::pair<const void*, std::string>, Generations>();
  auto store = group->getStore();
  while (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get()))
    store = prefixed->getUnderlyingStore();
  std::lock_guard lock(mutex);
  auto& generations = groups[{store.get(), group->getGroupName()}];
  generations.store = store;
  return generations.shared.find_or_make(generations.joined[group->getRank()]++, [&] {
    return std::make_shared<SharedShards>(group->getSize());
  });
}

class OneSidedGather final : public internal::Gather {
 public:
  OneSidedGather(std::shared_ptr<SharedShards> shared, int64_t rank, size_t number,
                 std::string what)
      : shared_(std::move(shared)), rank_(rank), number_(number), what_(std::move(what)) {}

  int64_t staging_bytes() const override { return 0; }
  GatheredRows wait() override {
    shared_->begin_reading(rank_);
    auto storages =
        std::make_shared<const std::vector<c10::Storage>>(shared_->shards(number_, what_));
    std::vector<const char*> rows;
    for (const auto& storage : *storages) rows.push_back(static_cast<const char*>(storage.data()));
    return {std::move(rows), {}, std::move(storages)};
  }

 private:
  std::shared_ptr<SharedShards> shared_;
  int64_t rank_;
  size_t number_;
  std::string what_;
};

class OneSidedReduction final : public internal::PendingReduction {
 public:
  OneSidedReduction(std::shared_ptr<SharedShards> shared, int64_t rank, uint64_t sequence,
                    const at::Tensor& rows, at::ScalarType dtype, std::string what)
      : shared_(std::move(shared)),
        rank_(rank),
        sequence_(sequence),
        dtype_(dtype),
        bytes_(rows.numel()),
        what_(std::move(what)) {
    shared_->come(rank, sequence, rows.unbind(0), what_);
  }
  ~OneSidedReduction() override { shared_->leave_meeting(sequence_); }

  int64_t staging_bytes() const override { return bytes_; }
  void progress() override {}
  at::Tensor wait() override {
    shared_->end_writing(rank_);
    const auto meeting = shared_->meet(sequence_, what_);
    std::vector<at::Tensor> mine;
    for (size_t peer = 0; peer < meeting.rows.size(); ++peer) {
      TORCH_CHECK(meeting.operations[peer] == what_, "collectives are out of order: rank ", peer,
                  " issued the ", meeting.operations[peer], " where rank ", rank_, " issued the ",
                  what_);
      mine.push_back(meeting.rows[peer][static_cast<size_t>(rank_)]);
    }
    return internal::sum_in_order(mine, dtype_);
  }

 private:
  std::shared_ptr<SharedShards> shared_;
  int64_t rank_;
  uint64_t sequence_;
  at::ScalarType dtype_;
  int64_t bytes_;
  std::string what_;
};

class OneSidedTransport final : public internal::Transport {
 public:
  explicit OneSidedTransport(const c10::intrusive_ptr<c10d::ProcessGroup>& group)
      : rank_(group->getRank()), size_(group->getSize()), shared_(meet_in(group)) {}
  ~OneSidedTransport() override { shared_->leave(rank_); }

  int64_t shard_rank() const override { return rank_; }
  int64_t shard_count() const override { return size_; }

  at::Tensor shard_memory(int64_t bytes, c10::Device device) override {
    shared_->begin_writing(rank_);
    auto memory = at::zeros({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
    numbers_[memory.storage().unsafeGetStorageImpl()] = shared_->add_shards(rank_, memory);
    return memory;
  }
  at::Tensor row_memory(int64_t row_bytes, c10::Device device) override {
    return at::empty({size_, row_bytes}, at::TensorOptions().dtype(at::kByte).device(device));
  }
  std::unique_ptr<internal::Gather> gather(const at::Tensor& shards, const Issue& issue) override {
    const auto number = numbers_.at(shards.storage().unsafeGetStorageImpl());
    return std::make_unique<OneSidedGather>(shared_, rank_, number,
                                            "all-gather of unit '" + issue.unit_name + "'");
  }
  std::unique_ptr<internal::PendingReduction> reduce(at::Tensor rows, at::ScalarType dtype,
                                                     const Issue& issue) override {
    return std::make_unique<OneSidedReduction>(shared_, rank_, sequence_++, rows, dtype,
                                               "reduce-scatter of unit '" + issue.unit_name + "'");
  }
  std::unique_ptr<internal::PendingReduction> all_reduce(at::Tensor row,
                                                         const Issue& issue) override {
    const auto dtype = row.scalar_type();
    return std::make_unique<OneSidedReduction>(
        shared_, rank_, sequence_++, row.view(at::kByte).unsqueeze(0).expand({size_, -1}), dtype,
        "all-reduce of unit '" + issue.unit_name + "'");
  }
  void before_shard_write() override { shared_->begin_writing(rank_); }
  void end_of_backward() override { shared_->end_writing(rank_); }
  bool checks_stamps() const override { return false; }
  bool reads_flags() const override { return true; }
  bool one_sided() const override { return true; }

 private:
  int64_t rank_, size_;
  std::shared_ptr<SharedShards> shared_;
  std::map<const c10::StorageImpl*, size_t> numbers_;
  uint64_t sequence_ = 0;
};

// Programs that were started with FSDP_TEST_TRANSPORT=one_sided run over this transport.
const bool installed = [] {
  const char* name = std::getenv("FSDP_TEST_TRANSPORT");
  if (name == nullptr || std::string(name) != "one_sided") return false;
  internal::set_transport_factory(make_one_sided_transport);
  return true;
}();

}  // namespace

std::unique_ptr<internal::Transport> make_one_sided_transport(const DeviceMesh& mesh, int64_t dim) {
  static_cast<void>(installed);
  return std::make_unique<OneSidedTransport>(mesh.group(dim));
}

}  // namespace fsdp::testing
