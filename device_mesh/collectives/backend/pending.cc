#include "device_mesh/collectives/backend/pending.h"

#include "device_mesh/collectives/backend/c10d_collectives.h"
#include "device_mesh/collectives/backend/slow_wait.h"
#include "device_mesh/collectives/failure_words.h"
#include "device_mesh/collectives/group.h"
#include "device_mesh/internal/text_of_error.h"
#include "device_mesh/internal/weak_registry.h"
#include "device_mesh/peer_memory/peer_channel.h"

#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <functional>
#include <initializer_list>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

namespace fsdp::internal {
namespace {

int64_t own_global_rank(const Group& group) {
  return ranks_in_job(group)[static_cast<size_t>(group->getRank())];
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

// Leaves word of this rank's failure in the group's store and names the ranks that leave
// none within a second: as a rule those that never came to the collective.
std::string word_of_others(const Group& group) {
  const auto names = ranks_in_job(group);
  std::vector<int64_t> group_ranks(static_cast<size_t>(group->getSize())), silent;
  std::iota(group_ranks.begin(), group_ranks.end(), 0);
  try {
    const auto store = group->getStore();
    if (!store) return "";
    exchange_failure_words(
        store, {.topic = "failed", .own = group->getRank(), .word = "failed", .ranks = group_ranks},
        [&](int64_t rank, const std::optional<std::string>& word) {
          if (!word) silent.push_back(names[static_cast<size_t>(rank)]);
        });
  } catch (const std::exception& error) {
    return c10::str(
        ". The rendezvous store can not be asked for the others: the rank that serves it,",
        " as a rule rank 0, has ended, or its host or the link to it is down (",
        first_line(text_of(error)), ")");
  }
  return silent.empty() ? "" : ". No word from rank " + rank_list(silent);
}

// Who the others are that failed, where `work` can not tell: a wait in shared memory
// names the rank that is missing, and the others are told.
std::string told_of_others(const Group& group, const c10::intrusive_ptr<c10d::Work>& work) {
  if (dynamic_cast<const PeerWait*>(work.get()) != nullptr) return "";
  return word_of_others(group) + ". Other ranks may hang until their timeout";
}

// Gloo tells of closed sockets alone. `peer`: a group rank; -1: any.
std::string with_who_ended(const Group& group, int64_t peer, const std::string& reason) {
  const std::initializer_list<const char*> closed = {
      "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed"};
  const bool is_closed = std::any_of(closed.begin(), closed.end(), [&](const char* words) {
    return reason.find(words) != std::string::npos;
  });
  if (!is_closed) return reason;
  const auto who =
      peer < 0 ? "a rank" : c10::str("rank ", ranks_in_job(group)[static_cast<size_t>(peer)]);
  return who + " has ended, or the link to it is down: " + reason;
}

// What is wrong with the link to that rank of the group; empty: nothing is known. Gloo
// never ends a send that was under way when the link broke, but it refuses the next one.
// Other backends are not asked: nobody receives what is sent for it.
std::string fault_of_link(const Group& group, int64_t peer) {
  if (!has_gloo(group)) return "";
  static auto& byte = *new at::Tensor(at::zeros({1}, at::kByte));
  try {
    std::vector<at::Tensor> tensors{byte};
    group->send(tensors, static_cast<int>(peer), kProbeTag);
    return "";
  } catch (const std::exception& error) {
    return text_of(error);
  }
}

[[noreturn]] void throw_failure(const Group& group, const std::string& what,
                                const std::string& reason,
                                const c10::intrusive_ptr<c10d::Work>& work) {
  const auto others = told_of_others(group, work);
  C10_THROW_ERROR(DistBackendError,
                  c10::str(what, " failed on rank ", own_global_rank(group), " in group '",
                           group->getGroupDesc(), "' of ranks ", rank_list(ranks_in_job(group)),
                           " (", group_backend(group), "): ", reason, others));
}

struct Abandoned {
  c10::intrusive_ptr<c10d::Work> work;
  std::shared_ptr<const void> memory;
};

}  // namespace

Pending::Pending() = default;
Pending::Pending(Group group, c10::intrusive_ptr<c10d::Work> work, std::function<void()> completion)
    : group_(std::move(group)), work_(std::move(work)), completion_(std::move(completion)) {}
Pending::Pending(Pending&&) noexcept = default;

Pending& Pending::operator=(Pending&& other) noexcept {
  Pending taken(std::move(other));
  std::swap(group_, taken.group_);
  std::swap(work_, taken.work_);
  std::swap(failure_, taken.failure_);
  std::swap(completion_, taken.completion_);
  std::swap(peer_, taken.peer_);
  std::swap(awaited_by_, taken.awaited_by_);
  return *this;  // what was in flight here is waited for by `taken`
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

Pending& Pending::awaited_by_stream() {
  awaited_by_ = AwaitedBy::kStream;
  return *this;
}

Pending& Pending::with_peer(int64_t group_rank) {
  peer_ = group_rank;
  return *this;
}

std::string Pending::describe_wait(const Group& group, const std::string& what) const {
  auto others = ranks_in_job(group);
  const auto own = others[static_cast<size_t>(group->getRank())];
  if (peer_ >= 0) {
    others = {others[static_cast<size_t>(peer_)]};
  } else {
    std::erase(others, own);
  }
  return c10::str("rank ", own, " still waits for the ", what, ": for rank ", rank_list(others));
}

c10::intrusive_ptr<c10d::Work> Pending::release() {
  failure_ = nullptr;
  return std::exchange(work_, {});
}

bool Pending::in_flight() const { return work_.defined() || failure_ != nullptr; }

bool Pending::finished() const { return !work_ || work_->isCompleted(); }

void Pending::wait(const std::string& what) {
  const Group group = group_;
  if (wait_unless_aborted(what)) return;
  throw_failure(group, what, "the collective was aborted", release());
}

bool Pending::wait_unless_aborted(const std::string& what) {
  if (!in_flight()) return true;
  const Group group = std::move(group_);
  const auto work = std::move(work_);
  const auto failure = std::exchange(failure_, nullptr);
  std::string fault;  // of the link, where the watch has ended the wait
  const auto look = [&] {
    if (peer_ < 0 || !fault.empty() || dynamic_cast<const PeerWait*>(work.get())) return;
    fault = fault_of_link(group, peer_);
    if (!fault.empty()) work->abort();
  };
  bool finished = false;
  try {
    if (failure) std::rethrow_exception(failure);
    std::optional<SlowWait> slow;
    if (awaited_by_ == AwaitedBy::kHost && !work->isCompleted())
      slow.emplace([&] { return describe_wait(group, what); }, std::cref(look));
    finished = work->wait();
  } catch (const std::exception& error) {
    throw_failure(group, what, with_who_ended(group, peer_, text_of(error)), work);
  }
  if (!finished && !fault.empty())
    throw_failure(group, what, with_who_ended(group, peer_, fault), work);
  if (!finished) {
    group_ = group;
    work_ = work;
    return false;
  }
  const auto completion = std::move(completion_);
  if (completion) completion();
  return true;
}

void abandon(const Group& group, Pending& message, std::shared_ptr<const void> memory) {
  static auto& kept =
      *new WeakKeyMap<c10::weak_intrusive_ptr<c10d::ProcessGroup>, std::vector<Abandoned>>();
  auto work = message.release();
  if (!work) return;
  kept.with(group, [&](std::vector<Abandoned>& messages) {
    messages.push_back({std::move(work), std::move(memory)});
  });
}

}  // namespace fsdp::internal
