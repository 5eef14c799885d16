#include "device_mesh/peer_memory/peer_memory.h"

#include "device_mesh/rendezvous/network.h"

#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>
#include <sched.h>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>
#include <sstream>
#include <string_view>
#include <thread>
#include <utility>

namespace fsdp::internal {
namespace {

constexpr int64_t kSpins = 1000;  // rounds, a microsecond or less each
constexpr auto kSleep = std::chrono::milliseconds(20);
constexpr auto kForReaders = std::chrono::seconds(2);

// What ranks that can open one another's memory have in common. Ranks in two network
// namespaces are taken as two hosts, as whoever put them there wants.
std::string host_identity() {
  std::array<char, 64> processes{};
  const auto length = readlink("/proc/self/ns/pid", processes.data(), processes.size());
  auto identity = network_identity() + "/" +
                  std::string(processes.data(), static_cast<size_t>(std::max<ssize_t>(length, 0))) +
                  "/" + std::to_string(geteuid());
  std::replace(identity.begin(), identity.end(), ' ', '/');
  return identity;
}

struct Invitation {
  std::string host;
  SegmentName control;
};

std::string to_text(const Invitation& invitation) {
  const auto& control = invitation.control;
  return c10::str(invitation.host, " ", control.pid, " ", control.fd, " ", control.bytes, " ",
                  control.mark);
}

Invitation parse_invitation(const std::string& text) {
  Invitation invitation;
  std::istringstream words(text);
  words >> invitation.host >> invitation.control.pid >> invitation.control.fd >>
      invitation.control.bytes >> invitation.control.mark;
  return invitation;
}

int64_t usable_cores() {
  cpu_set_t cores;
  return sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores)
                                                         : std::thread::hardware_concurrency();
}

// This thread is about to sleep until `page` is rung.
class Sleeper {
 public:
  explicit Sleeper(ControlPage& page) : page_(page) {
    page_.sleepers.fetch_add(1, std::memory_order_seq_cst);
    seen_ = page_.bell.load(std::memory_order_seq_cst);
    std::atomic_thread_fence(std::memory_order_seq_cst);  // before what it waits for is looked at
  }
  ~Sleeper() { page_.sleepers.fetch_sub(1, std::memory_order_seq_cst); }
  Sleeper(const Sleeper&) = delete;
  void sleep() const { sleep_until_rung(page_, seen_, kSleep); }

 private:
  ControlPage& page_;
  uint32_t seen_;
};

void pause_briefly() {
  for (int i = 0; i < 20; ++i) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }
}

constexpr char kCould[] = "yes";

std::string word_key(int64_t rank) { return "peer_memory/" + std::to_string(rank); }

void warn(int64_t rank, const std::string& reason) {
  TORCH_WARN("rank ", rank,
             " shares no memory with the other ranks of its host, so these "
             "communicate over Gloo, which is slower: ",
             reason, ". FSDP_PEER_MEMORY=off asks for that without this warning");
}

}  // namespace

PeerMemory::PeerMemory(int64_t rank, int64_t world)
    : rank_(rank), control_(SharedSegment::create(control_bytes(world))) {
  new (&page()) ControlPage{};
  arena_ = std::make_shared<Arena>([this](const SegmentName& name) { add_segment(name); });
  invitation_ = to_text({host_identity(), control_->name()});
}

PeerMemory::~PeerMemory() {
  if (control_->name().pid != getpid()) return;  // a copy of this process, which is no rank
  page().whereabouts.store(Whereabouts::kLeft, std::memory_order_release);
  for (const auto& [rank, peer] : peers_) peer->ring();
}

ControlPage& PeerMemory::page() const { return control_page(*control_); }

bool PeerMemory::are_of_one_host(const std::string& invitation, const std::string& other) {
  const auto host = parse_invitation(invitation).host;
  return !host.empty() && host == parse_invitation(other).host;
}

void PeerMemory::meet(int64_t rank, const std::string& invitation) {
  peers_[rank] =
      std::make_unique<Peer>(rank, parse_invitation(invitation).control, rank_, control_, arena_);
}

void PeerMemory::add_segment(const SegmentName& name) {
  const auto count = page().segments.load(std::memory_order_relaxed);
  TORCH_CHECK(count < ControlPage::kMaxSegments, "there are ", count, " pieces of it already");
  page().entries[count] = {.fd = name.fd, .bytes = name.bytes, .mark = name.mark};
  page().segments.store(count + 1, std::memory_order_release);
}

at::Tensor PeerMemory::as_sent(const at::Tensor& bytes) {
  const auto lent = Arena::lent_by(bytes);
  if (lent && lent->arena == arena_.get()) return bytes;
  auto copy = memory(bytes.numel());
  copy.unsafeGetTensorImpl()->set_sizes_contiguous(bytes.sizes());
  if (bytes.numel() == 0) return copy;
  if (!bytes.is_contiguous()) return copy.copy_(bytes);
  std::memcpy(copy.mutable_data_ptr(), bytes.const_data_ptr(), bytes.nbytes());
  return copy;
}

void PeerMemory::keep_while_read(const at::Tensor& block, std::vector<at::Tensor> others) {
  const std::lock_guard lock(mutex_);
  kept_.push_back({block, std::move(others)});
  std::erase_if(kept_, [](const KeptWhileRead& kept) {
    return Arena::lent_by(kept.block)->header->readers.load(std::memory_order_acquire) == 0;
  });
}

std::string PeerMemory::why_gone(int64_t rank) const {
  std::string why = peer(rank).why_gone();
  if (why.empty()) return why;
  for (const auto& [other, peer] : peers_)
    if (other != rank && peer->has_ended()) why += "; " + peer->why_gone();
  return why;
}

// More ranks than cores must not burn each other's time.
bool PeerMemory::sleeps_in(int64_t round) const {
  static const int64_t cores = usable_cores();
  return round >= kSpins || static_cast<int64_t>(peers_.size()) >= cores;
}

void PeerMemory::wait_round(int64_t round, c10::function_ref<bool()> is_over) {
  if (!sleeps_in(round)) return pause_briefly();
  const Sleeper sleeper(page());
  if (!is_over()) sleeper.sleep();
}

void PeerMemory::ring() { internal::ring(page()); }

void PeerMemory::wake_others() const {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (const auto& [rank, peer] : peers_) peer->wake();
}

BlockRef PeerMemory::block_of(const at::Tensor& tensor) {
  const auto lent = Arena::lent_by(tensor);
  TORCH_INTERNAL_ASSERT(lent);
  return lent->block;
}

// False where it has said so before.
bool PeerMemory::say(Whereabouts whereabouts) {
  auto here = Whereabouts::kHere;
  if (!page().whereabouts.compare_exchange_strong(here, whereabouts, std::memory_order_release))
    return false;
  for (const auto& [rank, peer] : peers_) peer->ring();
  return true;
}

void PeerMemory::leave() {
  say(Whereabouts::kLeft);
  await_readers();
}

void PeerMemory::await_readers() {
  const auto until = std::chrono::steady_clock::now() + kForReaders;
  while (!is_all_taken() && std::chrono::steady_clock::now() < until)
    wait_round(kSpins, [this] { return is_all_taken(); });
}

// Leaked: of the ranks of this process, as a rule one.
class PeerMemory::AtExit {
 public:
  static AtExit& get() {
    static auto& instance = *new AtExit();
    return instance;
  }

  void add(std::weak_ptr<PeerMemory> memory) {
    const std::lock_guard lock(mutex_);
    std::erase_if(ranks_, [](const auto& each) { return each.expired(); });
    if (std::exchange(process_, getpid()) != getpid()) {
      ranks_.clear();  // in a copy of a process they are that one's
      std::atexit([] { get().run(); });
    }
    ranks_.push_back(std::move(memory));
  }

 private:
  // First all say so, since none waits for one that has.
  void run() {
    if (process_ != getpid()) return;  // a copy of this process, which is no rank
    std::vector<std::shared_ptr<PeerMemory>> leaving;
    {
      const std::lock_guard lock(mutex_);
      for (const auto& weak : ranks_) {
        auto memory = weak.lock();
        if (memory && memory->say(Whereabouts::kEnded)) leaving.push_back(std::move(memory));
      }
    }
    for (const auto& memory : leaving) memory->await_readers();
  }

  std::mutex mutex_;
  std::vector<std::weak_ptr<PeerMemory>> ranks_;
  pid_t process_ = 0;  // for which run() is called
};

void PeerMemory::leave_at_exit(std::weak_ptr<PeerMemory> memory) {
  AtExit::get().add(std::move(memory));
}

// What has been taken is mapped by the rank that took it. What a rank that is gone has
// not taken, nobody will.
bool PeerMemory::is_all_taken() {
  return std::all_of(peers_.begin(), peers_.end(), [](const auto& peer) {
    return peer.second->has_taken_all() || !peer.second->why_gone().empty();
  });
}

PeerMemorySetting peer_memory_setting() {
  const char* const text = std::getenv("FSDP_PEER_MEMORY");
  const std::string_view value = text == nullptr ? "on" : text;
  if (value == "on") return PeerMemorySetting::kOn;
  if (value == "copy") return PeerMemorySetting::kCopy;
  TORCH_CHECK_VALUE(value == "off", "FSDP_PEER_MEMORY=", value, ": allowed are on, copy and off");
  return PeerMemorySetting::kOff;
}

PeerMeeting::PeerMeeting(int64_t rank, int64_t world) : rank_(rank) {
  if (world == 1 || peer_memory_setting() == PeerMemorySetting::kOff) return;
  try {
    memory_ = std::make_shared<PeerMemory>(rank, world);
  } catch (const c10::Error& error) {
    warn(rank, error.what_without_backtrace());
  }
}

void PeerMeeting::open(c10d::Store& store, const std::vector<std::string>& invitations) {
  if (!memory_) return;
  std::string word = kCould;
  for (size_t i = 0; i < invitations.size(); ++i) {
    const auto rank = static_cast<int64_t>(i);
    if (!PeerMemory::are_of_one_host(memory_->invitation(), invitations[i])) continue;
    ranks_.push_back(rank);
    if (rank == rank_ || word != kCould) continue;
    try {
      memory_->meet(rank, invitations[i]);
    } catch (const c10::Error& error) {
      word = error.what_without_backtrace();
    }
  }
  store.set(word_key(rank_), std::vector<uint8_t>(word.begin(), word.end()));
}

std::shared_ptr<PeerMemory> PeerMeeting::conclude(c10d::Store& store) {
  if (ranks_.size() < 2) return nullptr;
  for (const auto rank : ranks_) {
    const auto bytes = store.get(word_key(rank));
    const std::string word(bytes.begin(), bytes.end());
    if (word == kCould) continue;
    if (rank == rank_) warn(rank, word);
    return nullptr;
  }
  return std::move(memory_);
}

}  // namespace fsdp::internal
