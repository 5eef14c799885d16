// What one rank of a job waits for, and whether that can come: where ranks wait for one
// another (wait_graph.h) each of these waits is ended with an error that names all their
// operations, about a second after the last of them began.
//
//   const auto rank = WatchedRank::of(*name_in_job(group), global_rank);
//   const auto lane = rank->add_lane(name.group, issuers, refuse);
//   const auto operation = lane->issue("all-gather of unit 'l0'");
//   const WaitScope scope(operation);             // this thread does nothing but wait for it
//   operation->waits_for(peer, work);             // for that rank of the job, in c10d's work
//   work->wait();                                 // false: look at operation->verdict()
//
// Nothing is sent until a wait has lasted for some tenths of a second; from then on the
// rank leaves its waits in the job's store and reads those of the ranks that it waits
// for, through a connection of its own and in a thread of the process for all of its
// ranks: a store that does not answer delays nobody else. Thread-safe, but for look().
#pragma once

#include "device_mesh/collectives/group.h"
#include "device_mesh/collectives/wait_graph.h"

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace c10d {
class Store;
class Work;
}  // namespace c10d

namespace fsdp::internal {

class WatchedLane;
class WatchedRank;

// The threads that have issued something and still live. A lock of the rank's guards it.
class Issuers {
 public:
  void add_this_thread();
  std::vector<uint64_t> living() const;

 private:
  std::vector<std::pair<uint64_t, std::weak_ptr<const uint64_t>>> threads_;
};

// One operation that this rank has issued.
class AwaitedOperation {
 public:
  AwaitedOperation(std::shared_ptr<WatchedLane> lane, uint64_t number, std::string what);
  ~AwaitedOperation();

  // It waits for that rank from now on, in `work`; -1: for nobody.
  void waits_for(int64_t rank, c10::intrusive_ptr<c10d::Work> work);
  // Why it can never end, once that was found, soon after which `work` is aborted; else
  // empty.
  std::string verdict() const;

 private:
  friend class WatchedRank;
  friend class WaitScope;
  struct Waiting;
  const std::shared_ptr<WatchedLane> lane_;
  const uint64_t number_;
  const std::string what_;
  std::unique_ptr<Waiting> waiting_;
};

// One process group as this rank issues on it.
class WatchedLane : public std::enable_shared_from_this<WatchedLane> {
 public:
  using Refuse = std::function<void(const std::string& reason)>;

  WatchedLane(std::shared_ptr<WatchedRank> rank, std::string name, std::shared_ptr<Issuers> issuers,
              Refuse refuse);
  // By the calling thread.
  std::shared_ptr<AwaitedOperation> issue(std::string what);
  // What it waits for is nothing that the other rank issues (kNoOperation).
  std::shared_ptr<AwaitedOperation> wait_apart(std::string what);

 private:
  friend class AwaitedOperation;
  friend class WatchedRank;
  friend class WaitScope;
  const std::shared_ptr<WatchedRank> rank_;
  const std::string name_;
  const std::shared_ptr<Issuers> issuers_;  // shared by lanes that take turns
  const Refuse refuse_;
  uint64_t issued_ = 0;
};

// The calling thread does nothing but wait for `operation` as long as this lives.
class WaitScope {
 public:
  explicit WaitScope(std::shared_ptr<AwaitedOperation> operation);  // null: nothing
  ~WaitScope();
  WaitScope(const WaitScope&) = delete;
  WaitScope& operator=(const WaitScope&) = delete;

 private:
  std::shared_ptr<AwaitedOperation> operation_;
  uint64_t number_ = 0;
};

class WatchedRank : public std::enable_shared_from_this<WatchedRank> {
 public:
  using Clock = std::chrono::steady_clock;

  // The one object for that rank of the group's job. Local.
  static std::shared_ptr<WatchedRank> of(const GroupName& name, int64_t rank);

  WatchedRank(const GroupName& name, int64_t rank);
  ~WatchedRank();

  // `refuse` is called by look(), or at once, when nothing more may be issued there.
  std::shared_ptr<WatchedLane> add_lane(std::string name, std::shared_ptr<Issuers> issuers,
                                        WatchedLane::Refuse refuse);

  // Tells the others of waits that have lasted `patience`, and ends those that can not
  // end by themselves. By one thread, again and again. Throws what the store throws.
  void look(std::chrono::milliseconds patience);

 private:
  friend class AwaitedOperation;
  friend class WatchedLane;
  friend class WaitScope;

  struct Wait {
    uint64_t thread;
    std::shared_ptr<AwaitedOperation> operation;
  };
  // What look() knows of a wait.
  struct Watched {
    int64_t for_rank = -1;
    Clock::time_point since = {};
    std::vector<StuckThread> stuck_with = {};  // last time
    std::map<int64_t, uint64_t> beats = {};    // of their ranks, after that was known
    int looks = 0;                             // that gave the same
    int released_in = -1;                      // looks at most; -1: it is not condemned
  };

  RankWaits snapshot() const;  // REQUIRES: the lock is held
  bool has_old(const RankWaits& now, std::chrono::milliseconds patience);
  std::optional<RankWaits> read(int64_t rank);
  void tell(RankWaits& waits);
  void withdraw();
  void judge(const ThreadWait& wait, const RankWaits& own);
  bool is_confirmed(Watched& watched, std::vector<StuckThread> stuck,
                    const std::map<int64_t, uint64_t>& beats) const;
  void condemn(const ThreadWait& wait, Verdict verdict);
  bool others_know(const Watched& watched);
  void release(uint64_t wait);

  const int64_t rank_;
  const std::string key_prefix_;
  c10::intrusive_ptr<c10d::Store> store_;

  mutable std::mutex mutex_;
  std::vector<std::weak_ptr<WatchedLane>> lanes_;
  Issuers issuers_;
  std::map<uint64_t, Wait> waits_;
  Verdict verdict_;

  // Of look() alone.
  c10::intrusive_ptr<c10d::Store> connection_;
  std::map<uint64_t, Watched> watched_;
  Clock::time_point told_verdict_at_ = {};
  uint64_t beat_ = 0;
  bool is_told_ = false;
};

// How long a wait lasts before it is told, and how often it is looked at: 400 ms and 100
// ms unless set. For tests.
void set_wait_patience(std::chrono::milliseconds patience, std::chrono::milliseconds interval);

}  // namespace fsdp::internal
