#include "device_mesh/collectives/watched_rank.h"

#include "device_mesh/internal/weak_registry.h"
#include "device_mesh/peer_memory/peer_channel.h"

#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <thread>
#include <utility>

namespace fsdp::internal {
namespace {

// A verdict stays in the store for ranks that come to wait later.
constexpr auto kVerdictStays = std::chrono::seconds(60);
// Looks for which a condemned wait goes on at most, for the others to learn the verdict
// before this process, as after an error it may, ends.
constexpr int kLooksUntilRelease = 10;

uint64_t next_number() {
  static std::atomic<uint64_t> last = 0;
  return ++last;
}

// Of the calling thread; expires with it.
const std::shared_ptr<const uint64_t>& this_thread() {
  thread_local const auto number = std::make_shared<const uint64_t>(next_number());
  return number;
}

// Another connection to the same store, or that one where it has no connections.
c10::intrusive_ptr<c10d::Store> connection_to(const c10::intrusive_ptr<c10d::Store>& store) {
  try {
    return store->clone();
  } catch (const std::exception&) {
    return store;
  }
}

// The thread of a process that looks at the waits of its ranks. Leaked: it outlives
// static destruction.
class WaitWatch {
 public:
  static WaitWatch& get() {
    static auto& instance = *new WaitWatch();
    return instance;
  }

  void add(const std::shared_ptr<WatchedRank>& rank) {
    const std::lock_guard lock(mutex_);
    std::erase_if(ranks_, [](const auto& each) { return each.expired(); });
    ranks_.push_back(rank);
    if (!std::exchange(running_, true)) std::thread([this] { run(); }).detach();
  }
  void set(std::chrono::milliseconds patience, std::chrono::milliseconds interval) {
    const std::lock_guard lock(mutex_);
    patience_ = patience;
    interval_ = interval;
    changed_.notify_all();
  }

 private:
  [[noreturn]] void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait_for(lock, interval_);
      const auto patience = patience_;
      std::vector<std::shared_ptr<WatchedRank>> ranks;
      for (const auto& weak : ranks_) {
        if (auto rank = weak.lock()) ranks.push_back(std::move(rank));
      }
      lock.unlock();
      for (const auto& rank : ranks) look(*rank, patience);
      ranks.clear();
      lock.lock();
    }
  }

  static void look(WatchedRank& rank, std::chrono::milliseconds patience) {
    try {
      rank.look(patience);
    } catch (const std::exception&) {
      // The store is gone, or goes: waits end in their time-outs then.
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::weak_ptr<WatchedRank>> ranks_;
  std::chrono::milliseconds patience_{400}, interval_{100};
  bool running_ = false;
};

// Whether what `work` waits for is there, and its thread has only not run since. Only
// waits in shared memory are asked: of other works the ranks tell what they have issued
// (RankWaits::has_issued).
bool has_come(const c10::intrusive_ptr<c10d::Work>& work) {
  auto* const wait = dynamic_cast<PeerWait*>(work.get());
  return wait != nullptr && wait->has_come();
}

std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

}  // namespace

void Issuers::add_this_thread() {
  const auto& mine = this_thread();
  for (const auto& [number, alive] : threads_) {
    if (number == *mine) return;
  }
  std::erase_if(threads_, [](const auto& thread) { return thread.second.expired(); });
  threads_.emplace_back(*mine, mine);
}

std::vector<uint64_t> Issuers::living() const {
  std::vector<uint64_t> numbers;
  for (const auto& [number, alive] : threads_) {
    if (!alive.expired()) numbers.push_back(number);
  }
  return numbers;
}

struct AwaitedOperation::Waiting {
  int64_t for_rank = -1;
  c10::intrusive_ptr<c10d::Work> work = {};
  std::string verdict = {};
};

AwaitedOperation::AwaitedOperation(std::shared_ptr<WatchedLane> lane, uint64_t number,
                                   std::string what)
    : lane_(std::move(lane)),
      number_(number),
      what_(std::move(what)),
      waiting_(std::make_unique<Waiting>()) {}
AwaitedOperation::~AwaitedOperation() = default;

void AwaitedOperation::waits_for(int64_t rank, c10::intrusive_ptr<c10d::Work> work) {
  const std::lock_guard lock(lane_->rank_->mutex_);
  waiting_->for_rank = rank;
  waiting_->work.swap(work);
}

std::string AwaitedOperation::verdict() const {
  const std::lock_guard lock(lane_->rank_->mutex_);
  return waiting_->verdict;
}

WatchedLane::WatchedLane(std::shared_ptr<WatchedRank> rank, std::string name,
                         std::shared_ptr<Issuers> issuers, Refuse refuse)
    : rank_(std::move(rank)),
      name_(std::move(name)),
      issuers_(std::move(issuers)),
      refuse_(std::move(refuse)) {}

std::shared_ptr<AwaitedOperation> WatchedLane::issue(std::string what) {
  const std::lock_guard lock(rank_->mutex_);
  issuers_->add_this_thread();
  rank_->issuers_.add_this_thread();
  return std::make_shared<AwaitedOperation>(shared_from_this(), ++issued_, std::move(what));
}

std::shared_ptr<AwaitedOperation> WatchedLane::wait_apart(std::string what) {
  return std::make_shared<AwaitedOperation>(shared_from_this(), kNoOperation, std::move(what));
}

WaitScope::WaitScope(std::shared_ptr<AwaitedOperation> operation)
    : operation_(std::move(operation)), number_(operation_ ? next_number() : 0) {
  if (!operation_) return;
  auto& rank = *operation_->lane_->rank_;
  const std::lock_guard lock(rank.mutex_);
  rank.waits_.emplace(number_, WatchedRank::Wait{*this_thread(), operation_});
}

WaitScope::~WaitScope() {
  if (!operation_) return;
  auto& rank = *operation_->lane_->rank_;
  const std::lock_guard lock(rank.mutex_);
  rank.waits_.erase(number_);
}

std::shared_ptr<WatchedRank> WatchedRank::of(const GroupName& name, int64_t rank) {
  using Key = std::pair<const c10d::Store*, std::string>;
  static auto& known = *new WeakRegistry<Key, WatchedRank>();
  return known.find_or_make({name.store.get(), name.job + std::to_string(rank)}, [&] {
    auto made = std::make_shared<WatchedRank>(name, rank);
    WaitWatch::get().add(made);
    return made;
  });
}

WatchedRank::WatchedRank(const GroupName& name, int64_t rank)
    : rank_(rank), key_prefix_(name.job + "waits/"), store_(name.store) {}
WatchedRank::~WatchedRank() = default;

std::shared_ptr<WatchedLane> WatchedRank::add_lane(std::string name,
                                                   std::shared_ptr<Issuers> issuers,
                                                   WatchedLane::Refuse refuse) {
  auto lane = std::make_shared<WatchedLane>(shared_from_this(), std::move(name), std::move(issuers),
                                            std::move(refuse));
  std::string refused;
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(lanes_, [](const auto& each) { return each.expired(); });
    lanes_.push_back(lane);
    if (verdict_.covers(lane->name_)) refused = verdict_.text;
  }
  if (!refused.empty()) lane->refuse_(refused);
  return lane;
}

RankWaits WatchedRank::snapshot() const {
  RankWaits now{.threads = issuers_.living(), .verdict = verdict_};
  for (const auto& [number, wait] : waits_) {
    const auto& operation = *wait.operation;
    if (operation.waiting_->for_rank < 0 || has_come(operation.waiting_->work)) continue;
    now.waits.push_back({.thread = wait.thread,
                         .wait = number,
                         .operation = operation.number_,
                         .for_rank = operation.waiting_->for_rank,
                         .lane = operation.lane_->name_,
                         .what = operation.what_});
  }
  for (const auto& weak : lanes_) {
    if (const auto lane = weak.lock())
      now.lanes.push_back({lane->issued_, lane->issuers_->living(), lane->name_});
  }
  return now;
}

// Also forgets what is known of waits that have ended.
bool WatchedRank::has_old(const RankWaits& now, std::chrono::milliseconds patience) {
  std::erase_if(watched_, [&](const auto& item) {
    return std::none_of(now.waits.begin(), now.waits.end(),
                        [&](const ThreadWait& wait) { return wait.wait == item.first; });
  });
  const auto time = Clock::now();
  bool some = false;
  for (const auto& wait : now.waits) {
    auto& watched = watched_[wait.wait];
    if (watched.for_rank != wait.for_rank) watched = {.for_rank = wait.for_rank, .since = time};
    some |= time - watched.since >= patience;
  }
  return some;
}

void WatchedRank::look(std::chrono::milliseconds patience) {
  RankWaits now;
  {
    const std::lock_guard lock(mutex_);
    if (waits_.empty() && verdict_.lanes.empty() && !is_told_) return;
    now = snapshot();
  }
  const bool tells_verdict =
      !now.verdict.lanes.empty() && Clock::now() - told_verdict_at_ < kVerdictStays;
  if (!has_old(now, patience) && !tells_verdict) return withdraw();
  tell(now);
  for (const auto& wait : now.waits) {
    if (Clock::now() - watched_[wait.wait].since >= patience) judge(wait, now);
  }
}

void WatchedRank::tell(RankWaits& waits) {
  if (!connection_) connection_ = connection_to(store_);
  waits.beat = ++beat_;
  connection_->set(key_prefix_ + std::to_string(rank_), bytes_of(to_text(waits)));
  is_told_ = true;
}

void WatchedRank::withdraw() {
  if (!std::exchange(is_told_, false)) return;
  connection_->deleteKey(key_prefix_ + std::to_string(rank_));
}

// One request, and no wait for a key that is not there.
std::optional<RankWaits> WatchedRank::read(int64_t rank) {
  const std::string none = "none";
  const auto bytes =
      connection_->compareSet(key_prefix_ + std::to_string(rank), bytes_of(none), bytes_of(none));
  const std::string text(bytes.begin(), bytes.end());
  return text == none ? std::nullopt : parse_rank_waits(text);
}

void WatchedRank::judge(const ThreadWait& wait, const RankWaits& own) {
  auto& watched = watched_[wait.wait];
  if (watched.released_in >= 0) {
    if (watched.released_in-- == 0 || others_know(watched)) release(wait.wait);
    return;
  }
  std::map<int64_t, uint64_t> beats;
  const auto waits_of = [&](int64_t rank) {
    if (rank == rank_) return std::optional(own);
    auto waits = read(rank);
    if (waits) beats[rank] = waits->beat;
    return waits;
  };
  if (const auto other = waits_of(wait.for_rank);
      other && other->verdict.covers(wait.lane) && !other->has_issued(wait.lane, wait.operation))
    return condemn(wait, other->verdict);
  auto stuck = stuck_with(rank_, wait, waits_of);
  if (is_confirmed(watched, std::move(stuck), beats)) condemn(wait, verdict_on(watched.stuck_with));
}

// What ranks told was so when they told it. That all of it was so at one time, the end of
// the first look, is sure once each has told the same twice since the second look began:
// what it told the second time it saw after that.
bool WatchedRank::is_confirmed(Watched& watched, std::vector<StuckThread> stuck,
                               const std::map<int64_t, uint64_t>& beats) const {
  if (stuck.empty() || stuck != watched.stuck_with) {
    watched.stuck_with = std::move(stuck);
    watched.looks = 1;
    return false;
  }
  if (++watched.looks == 2) {
    watched.beats = beats;
    return false;
  }
  return std::all_of(watched.beats.begin(), watched.beats.end(), [&](const auto& before) {
    const auto now = beats.find(before.first);
    return now != beats.end() && now->second >= before.second + 2;
  });
}

void WatchedRank::condemn(const ThreadWait& wait, Verdict verdict) {
  if (!verdict.covers(wait.lane)) verdict.lanes.push_back(wait.lane);
  std::vector<std::shared_ptr<WatchedLane>> refused;
  {
    const std::lock_guard lock(mutex_);
    verdict_.text = verdict.text;
    for (const auto& lane : verdict.lanes) {
      if (!verdict_.covers(lane)) verdict_.lanes.push_back(lane);
    }
    if (const auto found = waits_.find(wait.wait); found != waits_.end())
      found->second.operation->waiting_->verdict = verdict.text;
    for (const auto& weak : lanes_) {
      const auto lane = weak.lock();
      if (lane && verdict_.covers(lane->name_)) refused.push_back(lane);
    }
  }
  for (const auto& lane : refused) lane->refuse_(verdict.text);
  told_verdict_at_ = Clock::now();
  watched_[wait.wait].released_in = kLooksUntilRelease;
}

// Those that this wait was found to be stuck with. What this rank told in this look has
// the verdict.
bool WatchedRank::others_know(const Watched& watched) {
  return std::all_of(watched.stuck_with.begin(), watched.stuck_with.end(),
                     [&](const StuckThread& each) {
                       if (each.rank == rank_) return true;
                       const auto waits = read(each.rank);
                       return !waits || waits->verdict.covers(each.wait.lane);
                     });
}

void WatchedRank::release(uint64_t wait) {
  c10::intrusive_ptr<c10d::Work> work;
  {
    const std::lock_guard lock(mutex_);
    const auto found = waits_.find(wait);
    if (found == waits_.end()) return;
    work = found->second.operation->waiting_->work;
  }
  try {
    if (work) work->abort();
  } catch (const std::exception&) {
    // This backend has no way to end a wait: it ends in its time-out.
  }
}

void set_wait_patience(std::chrono::milliseconds patience, std::chrono::milliseconds interval) {
  WaitWatch::get().set(patience, interval);
}

}  // namespace fsdp::internal
