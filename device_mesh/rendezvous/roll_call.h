// How the members of a new process group make sure of one another in its store, and tell
// one another when it cannot be made.
//
//   RollCall roll({.store = key_space, .group = "process group 'world'", ...});
//   const auto members = roll.gather(own);   // where each runs, by group rank
//   roll.attempt([&] { ... });               // get ready to connect
//   roll.meet(Stage::kReady);
//   roll.attempt([&] { ... });               // connect
//   roll.meet(Stage::kConnected);            // nobody goes on before all have
//   roll.leave();                            // the process that serves the store leaves last
//
// Each step throws alike on all ranks that are there: DistStoreError that names who is
// missing and who is there when the time is up, or as soon as one of those is known to be
// gone, or what one of them met in attempt(). A wait of more than 30 s is told to stderr.
// Calls of the store may block for longer than the time when its host does not answer:
// run it within a deadline (deadline.h).
#pragma once

#include "device_mesh/rendezvous/presence.h"

#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace c10d {
class Store;
}

namespace fsdp::internal {

struct RollCallOptions {
  c10::intrusive_ptr<c10d::Store> store;  // the group's own key space
  std::string group;                      // what is made, for messages
  std::vector<int64_t> ranks;             // of the job, by group rank
  int64_t index = 0;                      // this rank's, in the group
  std::chrono::steady_clock::time_point deadline;
  std::string advice;         // what to look at where ranks are missing
  bool serves_store = false;  // this process does: it leaves last
  // Why not all ranks of the group can come any more; empty: they may. Null: nobody
  // knows.
  std::function<std::string()> why_gone = {};
};

class RollCall {
 public:
  explicit RollCall(RollCallOptions options);

  // Throws ValueError where a rank that came before gave another `value` of `what`, a
  // launcher's variable.
  void agree(const std::string& what, const std::string& value);
  // Tells the others `own` and gives what each told, by group rank.
  std::vector<Presence> gather(const Presence& own);
  // Returns when all have come there.
  enum class Stage { kReady, kConnected };
  void meet(Stage stage);
  // After the last meet(): this rank asks the store nothing more. The process that serves
  // it may end as soon as this returns, so there it waits until all have called it; for
  // 30 s at most, since one of them may just have been killed.
  void leave();

  // Runs what this rank does by itself. What it throws is told to the others, who throw
  // the same: a ValueError remains one.
  template <class Step>
  auto attempt(const Step& step) {
    try {
      return step();
    } catch (const c10::ValueError& error) {
      refuse(error.what_without_backtrace(), /*mistake=*/true);
    } catch (const c10::Error& error) {
      refuse(error.what_without_backtrace(), /*mistake=*/false);
    } catch (const std::exception& error) {
      refuse(error.what(), /*mistake=*/false);
    }
  }

  // Whether it has been decided that all were there, or not.
  bool gathered() const;
  // Where the process that came as this rank told that it runs, if it did within
  // `patience`.
  std::optional<Presence> claimed_by(std::chrono::milliseconds patience) const;

 private:
  struct Missing {
    std::vector<int64_t> ranks;
    std::map<int64_t, Presence> present;
  };
  [[noreturn]] void refuse(const std::string& reason, bool mistake);
  [[noreturn]] void fail(const std::string& verdict) const;
  void meet_at(const std::string& topic, const std::string& word);
  void await_verdict(const std::string& topic);
  bool wait_until(const std::string& key, std::chrono::steady_clock::time_point until) const;
  bool wait_until(const std::vector<std::string>& keys,
                  std::chrono::steady_clock::time_point until) const;
  bool await_members(const std::string& topic, std::chrono::steady_clock::time_point until);
  void conclude(const std::string& topic, const std::string& verdict);
  void conclude_for_good(const std::string& topic, const std::string& verdict,
                         std::chrono::milliseconds patience);
  void leave_last();
  Missing missing(const std::string& topic) const;
  std::string describe_missing(const std::string& topic, const std::string& since) const;
  std::string text_of(const std::string& key) const;
  int64_t rank() const { return options_.ranks[static_cast<size_t>(options_.index)]; }

  RollCallOptions options_;
  std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
};

}  // namespace fsdp::internal
