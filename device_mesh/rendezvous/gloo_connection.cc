#include "device_mesh/rendezvous/gloo_connection.h"

#include "device_mesh/peer_memory/peer_memory.h"
#include "device_mesh/rendezvous/deadline.h"
#include "device_mesh/rendezvous/network.h"
#include "device_mesh/rendezvous/presence.h"
#include "device_mesh/rendezvous/rendezvous.h"
#include "device_mesh/rendezvous/roll_call.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <sched.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

namespace fsdp::internal {
namespace {

bool set_own_policy(int policy) {
  const sched_param no_priority = {};
  return sched_setscheduler(/*pid=*/0, policy, &no_priority) == 0;
}

// While one lives, the threads that this thread starts are scheduled as SCHED_BATCH.
//
// A thread of Gloo's transport that wakes up spins as long as another thread is inside a
// send or receive of the same connection (gloo/transport/tcp/pair.cc, handleEvents).
// Where it has taken that thread's core, it spins until the scheduler takes the core
// back, milliseconds later. As batch work it waits for an idle core or its turn instead.
class StartsBatchThreads {
 public:
  StartsBatchThreads()
      : changed_(sched_getscheduler(/*pid=*/0) == SCHED_OTHER && set_own_policy(SCHED_BATCH)) {}
  ~StartsBatchThreads() {
    if (changed_) set_own_policy(SCHED_OTHER);
  }
  StartsBatchThreads(const StartsBatchThreads&) = delete;
  StartsBatchThreads& operator=(const StartsBatchThreads&) = delete;

 private:
  bool changed_;  // false: this thread has a policy of its own, which stays
};

using c10d::ProcessGroupGloo;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

// Empty for a store that has no host, such as a file.
std::string host_of(StorePtr store) {
  if (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get()))
    store = prefixed->getUnderlyingNonPrefixStore();
  if (const auto* tcp = dynamic_cast<c10d::TCPStore*>(store.get())) return tcp->getHost();
  return dynamic_cast<c10d::HashStore*>(store.get()) != nullptr ? "localhost" : "";
}

std::vector<std::string> interfaces_of_user() {
  return parse_interface_list(process_environment()("GLOO_SOCKET_IFNAME"));
}

std::string likely_address(const StorePtr& store) {
  const auto interfaces = interfaces_of_user();
  if (!interfaces.empty()) return addresses_of(interfaces, network_interfaces()).front();
  const auto host = host_of(store);
  if (is_loopback(host)) return "127.0.0.1";
  const auto address = address_of_own_name();
  return address.empty() && !host.empty() ? address_towards(host) : address;
}

// With the address by which the ranks that meet in `store` would reach this process: that
// of GLOO_SOCKET_IFNAME, the loopback one where the store is at one, that of its host's
// own name, or that from which packets leave for the store. Throws ValueError for an
// interface that is not there.
Presence presence_at(const StorePtr& store) {
  auto told = presence();
  told.address = likely_address(store);
  return told;
}

// The address by which this rank connects. Throws ValueError where members on other hosts
// cannot reach this one by any that is known, before anybody connects.
std::string chosen_address(const Presence& own, const std::vector<Presence>& all) {
  const auto present = network_interfaces();
  const auto interfaces = interfaces_of_user();
  if (interfaces.empty()) return gloo_address(own, all, &address_towards, present);
  check_reachable(interfaces, own, all, present);
  return own.address;
}

// What the thread that connects is at, for the one that waits for it.
class Progress {
 public:
  void set(std::string text) {
    const std::lock_guard lock(mutex_);
    text_ = std::move(text);
  }
  std::string text() {
    const std::lock_guard lock(mutex_);
    return text_;
  }

 private:
  std::mutex mutex_;
  std::string text_ =
      "waiting for an answer of the store. The host of the rank that serves it, as a rule rank 0, "
      "or the link to it is down";
};

std::vector<std::string> invitations_of(const std::vector<Presence>& members) {
  std::vector<std::string> invitations;
  for (const auto& member : members) invitations.push_back(member.memory);
  return invitations;
}

// Owns what it uses, since its thread may be abandoned.
class Connection {
 public:
  Connection(const GlooRequest& request, std::shared_ptr<Progress> progress)
      : request_(request), progress_(std::move(progress)) {}

  GlooGroup operator()() {
    const auto instance = open_key_space(*request_.store, request_.key_space, request_.opener);
    const auto store = key_space(request_.store, request_.key_space, instance);
    RollCall roll(roll_call_options(store));
    const bool is_world = request_.devices.empty();
    if (is_world && instance > 1) check_not_twice(instance - 1);
    std::optional<PeerMeeting> meeting;
    const auto own = roll.attempt([&] {
      if (!is_world) return presence();
      roll.agree("WORLD_SIZE", std::to_string(request_.ranks.size()));
      meeting.emplace(request_.index, static_cast<int64_t>(request_.ranks.size()));
      auto presence = presence_at(request_.store);
      presence.memory = meeting->invitation();
      return presence;
    });
    const auto members = roll.gather(own);
    if (is_world) warn_of_threads(members);
    roll.attempt([&] {
      get_ready(own, members);
      if (meeting) meeting->open(*store, invitations_of(members));
    });
    roll.meet(RollCall::Stage::kReady);
    auto backend = roll.attempt([&] { return connect(store); });
    auto memory = roll.attempt([&] { return meeting ? meeting->conclude(*store) : nullptr; });
    roll.meet(RollCall::Stage::kConnected);
    roll.leave();
    return {store, std::move(backend), std::move(memory)};
  }

 private:
  RollCallOptions roll_call_options(StorePtr store) const {
    return {.store = std::move(store),
            .group = "process group '" + request_.name + "'",
            .ranks = request_.ranks,
            .index = request_.index,
            .deadline = request_.deadline,
            .advice = request_.advice,
            .serves_store = is_served_here(*request_.store),
            .why_gone = request_.why_gone};
  }

  // That no other process is making this group as this rank.
  void check_not_twice(int64_t instance_before) const {
    constexpr auto kAtMost = std::chrono::seconds(5);  // from opening to telling
    RollCall before(
        roll_call_options(key_space(request_.store, request_.key_space, instance_before)));
    before.attempt([&] {
      if (before.gathered()) return;
      const auto other = before.claimed_by(kAtMost);
      TORCH_CHECK_VALUE(!other, "two processes have come as this rank: ", describe(*other),
                        ", and ", describe(presence()),
                        ". Look how RANK is set; if the first one has ended, start all ranks anew");
    });
  }

  void warn_of_threads(const std::vector<Presence>& members) const {
    if (std::getenv("OMP_NUM_THREADS") != nullptr) return;  // somebody has thought of it
    const auto advice =
        advice_about_threads(members, static_cast<size_t>(request_.index), at::get_num_threads(),
                             static_cast<int64_t>(std::thread::hardware_concurrency()));
    if (advice.empty()) return;
    TORCH_WARN_ONCE(advice);
  }

  void get_ready(const Presence& own, const std::vector<Presence>& members) {
    if (request_.devices.empty()) {
      const auto address = chosen_address(own, members);
      request_.devices = open_gloo_devices(address);
      way_ = describe_way(address, members);
    }
    progress_->set("connecting over Gloo from " + way_);
  }

  c10::intrusive_ptr<ProcessGroupGloo> connect(const StorePtr& store) const {
    auto options = ProcessGroupGloo::Options::create(request_.timeout);
    options->group_name = request_.name;
    options->global_ranks_in_group.assign(request_.ranks.begin(), request_.ranks.end());
    options->threads = 2;
    options->devices = request_.devices;
    const auto prefixed = c10::make_intrusive<c10d::PrefixStore>("gloo", store);
    try {
      auto made =
          c10::make_intrusive<ProcessGroupGloo>(prefixed, static_cast<int>(request_.index),
                                                static_cast<int>(request_.ranks.size()), options);
      progress_->set("waiting for the others to connect, and for an answer of the store");
      return made;
    } catch (const c10::Error& error) {
      C10_THROW_ERROR(DistBackendError, c10::str("could not connect over Gloo from ", way_, ": ",
                                                 error.what_without_backtrace()));
    }
  }

  // "10.0.0.2 to rank 0 at 10.0.0.1 (pid ...). ..."
  std::string describe_way(const std::string& address, const std::vector<Presence>& members) const {
    constexpr size_t kNamed = 16;
    auto text = address + " on host '" + host_name() + "' to";
    for (size_t i = 0, named = 0; i < members.size() && named < kNamed; ++i) {
      if (static_cast<int64_t>(i) == request_.index) continue;
      text += c10::str(named++ == 0 ? " " : ", ", "rank ", request_.ranks[i], " (",
                       describe(members[i]), ", ", members[i].address, ")");
    }
    return text +
           ". Look whether these still run. Where hosts do not reach each other by these "
           "addresses, "
           "set GLOO_SOCKET_IFNAME to the network interface by which they do; this host has: " +
           describe(network_interfaces());
  }

  GlooRequest request_;
  std::shared_ptr<Progress> progress_;
  std::string way_ = "the addresses of its parent group";
};

// Looks for ranks of the group that are gone while this one connects to them, which Gloo
// would try until its timeout. The roll call tells all ranks, so it has the first word.
class GoneMembers {
 public:
  explicit GoneMembers(const GlooRequest& request) : request_(request) {}

  bool are_known_for_long() {
    constexpr auto kForRollCall = std::chrono::milliseconds(400);
    const auto now = std::chrono::steady_clock::now();
    if (why_.empty()) {
      if (request_.why_gone) why_ = request_.why_gone();
      since_ = now;
    }
    return !why_.empty() && now - since_ >= kForRollCall;
  }
  const std::string& why() const { return why_; }

 private:
  const GlooRequest& request_;
  std::string why_;
  std::chrono::steady_clock::time_point since_;
};

}  // namespace

GlooRequest::GlooRequest() = default;
GlooRequest::GlooRequest(const GlooRequest&) = default;
GlooRequest::~GlooRequest() = default;

GlooGroup connect_gloo(const GlooRequest& request) {
  constexpr auto kAnswer = std::chrono::seconds(3);  // for the store to tell what it knows
  const auto progress = std::make_shared<Progress>();
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(request.deadline -
                                                                 std::chrono::steady_clock::now());
  const auto refused = c10::str("process group '", request.name, "' of ", ranks_text(request.ranks),
                                " can not be made (told on rank ",
                                request.ranks[static_cast<size_t>(request.index)], "): ");
  GoneMembers gone(request);
  std::optional<GlooGroup> made;
  try {
    made = call_with_deadline(std::max(left, std::chrono::milliseconds(0)) + kAnswer,
                              Connection(request, progress),
                              [&gone] { return gone.are_known_for_long(); });
  } catch (const c10::DistNetworkError& error) {
    C10_THROW_ERROR(DistNetworkError,
                    c10::str(refused,
                             "the rank that serves the store, as a rule rank 0, has ended (its "
                             "own output tells why), or its host or the link to it is down: ",
                             error.what_without_backtrace()));
  }
  TORCH_CHECK_WITH(DistStoreError, made || gone.why().empty(), refused, gone.why());
  TORCH_CHECK_WITH(DistStoreError, made, refused, "after its timeout this rank is still ",
                   progress->text());
  return *std::move(made);
}

int64_t open_key_space(c10d::Store& store, const std::string& name, int64_t opener) {
  return store.add(name + "/opened/" + std::to_string(opener), 1);
}

StorePtr key_space(const StorePtr& store, const std::string& name, int64_t instance) {
  return c10::make_intrusive<c10d::PrefixStore>(name + "/" + std::to_string(instance), store);
}

Presence presence() { return {host_name(), getpid(), network_identity()}; }

GlooDevices open_gloo_devices(const std::string& address) {
  const StartsBatchThreads policy;
  const auto interfaces = interfaces_of_user();
  if (interfaces.empty()) return {ProcessGroupGloo::createDeviceForHostname(address)};
  GlooDevices devices;
  for (const auto& name : interfaces)
    devices.push_back(ProcessGroupGloo::createDeviceForInterface(name));
  return devices;
}

}  // namespace fsdp::internal
