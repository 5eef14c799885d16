#include "device_mesh/peer_memory/peer.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <climits>
#include <cstring>
#include <ctime>
#include <new>
#include <utility>

namespace fsdp::internal {
namespace {

// What a received tensor holds.
struct Reading {
  std::shared_ptr<SharedSegment> segment, control;  // of the sender
  BlockHeader* block;

  static void destroy(void* context) {
    auto* const reading = static_cast<Reading*>(context);
    reading->block->readers.fetch_sub(1, std::memory_order_release);
    ring(control_page(*reading->control));
    delete reading;
  }
};

}  // namespace

ControlPage& control_page(const SharedSegment& control) {
  return *reinterpret_cast<ControlPage*>(control.data() + SharedSegment::kHeaderBytes);
}

MessageLane& lane_to(const SharedSegment& control, int64_t rank) {
  auto* const lanes = control.data() + SharedSegment::kHeaderBytes + sizeof(ControlPage);
  return reinterpret_cast<MessageLane*>(lanes)[rank];
}

size_t control_bytes(int64_t world) {
  return SharedSegment::kHeaderBytes + sizeof(ControlPage) +
         static_cast<size_t>(world) * sizeof(MessageLane);
}

void sleep_until_rung(const ControlPage& page, uint32_t seen, std::chrono::milliseconds at_most) {
  const timespec time{.tv_sec = at_most.count() / 1000,
                      .tv_nsec = at_most.count() % 1000 * 1'000'000};
  syscall(SYS_futex, &page.bell, FUTEX_WAIT, seen, &time, nullptr, 0);
}

// Either side alone would lose wake-ups: whoever sleeps counts first and looks then.
void ring(ControlPage& page) {
  page.bell.fetch_add(1, std::memory_order_seq_cst);
  if (page.sleepers.load(std::memory_order_seq_cst) != 0)
    syscall(SYS_futex, &page.bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

ProcessWatch::ProcessWatch(int64_t pid) : pid_(pid) {
  if (pid == getpid()) return;
  fd_ = static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(pid), 0));
  TORCH_CHECK(fd_ >= 0, "process ", pid, " can not be watched: pidfd_open: ", std::strerror(errno));
}

ProcessWatch::~ProcessWatch() {
  if (fd_ >= 0) close(fd_);
}

bool ProcessWatch::ends_within(std::chrono::milliseconds limit) const {
  pollfd ended{.fd = fd_, .events = POLLIN, .revents = 0};
  return fd_ >= 0 && poll(&ended, 1, static_cast<int>(limit.count())) == 1;
}

Peer::Peer(int64_t rank, const SegmentName& control, int64_t own_rank,
           std::shared_ptr<SharedSegment> own, std::shared_ptr<Arena> arena)
    : rank_(rank),
      own_rank_(own_rank),
      process_(control.pid),  // before its memory: of one that has ended there is none
      control_(SharedSegment::open(control)),
      own_(std::move(own)),
      arena_(std::move(arena)) {}

void Peer::free_passed() {
  const auto passed = lane_to(*control_, own_rank_).passed.load(std::memory_order_acquire);
  for (; freed_ + 1 < passed; ++freed_) {
    arena_->give_back(sent_.front());
    sent_.pop_front();
  }
}

void Peer::send(const PeerMessage& message) {
  const std::lock_guard lock(mutex_);
  free_passed();
  const auto block = arena_->take(sizeof(MessageNode));
  auto* const node = new (block.data) MessageNode{};
  node->channel = message.channel;
  node->number = message.number;
  node->notice = message.notice;
  if (message.body.defined()) {
    const auto lent = Arena::lent_by(message.body);
    TORCH_INTERNAL_ASSERT(lent && lent->arena == arena_.get());
    lent->header->readers.fetch_add(1, std::memory_order_relaxed);
    node->block = lent->block.word();
    node->offset = lent->offset;
    node->bytes = message.body.nbytes();
  }
  auto& link = last_sent_ == nullptr ? lane_to(*own_, rank_).first : last_sent_->next;
  link.store(block.ref.word(), std::memory_order_release);
  last_sent_ = node;
  sent_.push_back(block);
  ring();
}

// Of its memory; opened when it is first read.
char* Peer::at(BlockRef ref) {
  if (segments_.size() <= ref.segment()) segments_.resize(ref.segment() + 1);
  auto& segment = segments_[ref.segment()];
  if (!segment) segment = open(ref.segment());
  return segment->data() + ref.offset();
}

std::shared_ptr<SharedSegment> Peer::open(uint32_t segment) const {
  constexpr auto kToEnd = std::chrono::seconds(1);  // its files are closed before it has ended
  const auto& entry = control_page(*control_).entries[segment];
  try {
    return SharedSegment::open(
        {.pid = process_.pid(), .fd = entry.fd, .bytes = entry.bytes, .mark = entry.mark});
  } catch (const c10::Error&) {
    if (!process_.ends_within(kToEnd)) throw;
  }
  TORCH_CHECK(false, why_gone(), ", and what this rank had not read yet went with it");
}

char* Peer::bytes_of(BlockRef block) {
  const std::lock_guard lock(mutex_);
  return at(block) + sizeof(BlockHeader);
}

void Peer::wake() const {
  auto& page = control_page(*control_);
  if (page.sleepers.load(std::memory_order_relaxed) != 0) internal::ring(page);
}

at::Tensor Peer::body_of(const MessageNode& node) {
  const BlockRef block(node.block);
  if (!block) return {};
  auto* const header = reinterpret_cast<BlockHeader*>(at(block));
  auto* const data = reinterpret_cast<char*>(header + 1) + node.offset;
  auto* const reading = new Reading{segments_[block.segment()], control_, header};
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), node.bytes,
      c10::DataPtr(data, reading, &Reading::destroy, c10::Device(c10::kCPU)),
      c10::GetCPUAllocator(),
      /*resizable=*/false);
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(std::move(storage)),
                                                   c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                   c10::scalarTypeToTypeMeta(at::kByte));
  impl->set_sizes_contiguous({static_cast<int64_t>(node.bytes)});
  return at::Tensor(std::move(impl));
}

// Takes all that has come off the list.
void Peer::receive() {
  while (true) {
    const auto& link =
        last_received_ == nullptr ? lane_to(*control_, own_rank_).first : last_received_->next;
    const BlockRef next(link.load(std::memory_order_acquire));
    if (!next) return;
    auto* const node = reinterpret_cast<MessageNode*>(at(next) + sizeof(BlockHeader));
    auto body = body_of(*node);
    if (unwanted_.erase({node->channel, node->number}) == 0)
      inbox_.push_back({node->channel, node->number, node->notice, std::move(body)});
    last_received_ = node;
    lane_to(*own_, rank_).passed.store(++passed_, std::memory_order_release);
  }
}

Peer::Inbox::iterator Peer::find(uint64_t channel, uint64_t number) {
  receive();
  for (auto each = inbox_.begin(); each != inbox_.end(); ++each) {
    if (each->channel == channel && each->number == number) return each;
  }
  return inbox_.end();
}

std::optional<PeerMessage> Peer::take(uint64_t channel, uint64_t number) {
  const std::lock_guard lock(mutex_);
  const auto found = find(channel, number);
  if (found == inbox_.end()) return std::nullopt;
  auto message = std::move(*found);
  inbox_.erase(found);
  return message;
}

void Peer::drop(uint64_t channel, uint64_t number) {
  const std::lock_guard lock(mutex_);
  const auto found = find(channel, number);
  found == inbox_.end() ? void(unwanted_.insert({channel, number})) : void(inbox_.erase(found));
}

bool Peer::has_come(uint64_t channel, uint64_t number) {
  const std::lock_guard lock(mutex_);
  return find(channel, number) != inbox_.end();
}

void Peer::send_failure(uint64_t channel, const std::string& reason) {
  auto text = arena_->memory(static_cast<int64_t>(reason.size()));
  std::memcpy(text.mutable_data_ptr(), reason.data(), reason.size());
  send({.channel = channel, .number = kFailureNumber, .body = text});
}

std::string Peer::failure_in(uint64_t channel) {
  const std::lock_guard lock(mutex_);
  const auto found = find(channel, kFailureNumber);
  if (found == inbox_.end() || !found->body.defined()) return "";
  return {static_cast<const char*>(found->body.const_data_ptr()), found->body.nbytes()};
}

Whereabouts Peer::whereabouts() const {
  return control_page(*control_).whereabouts.load(std::memory_order_acquire);
}

bool Peer::has_ended() const {
  const auto last = whereabouts();
  return last == Whereabouts::kEnded || (last == Whereabouts::kHere && process_.has_ended());
}

std::string Peer::why_gone() const {
  if (has_ended()) return c10::str("rank ", rank_, " has ended (process ", process_.pid(), ")");
  if (whereabouts() == Whereabouts::kLeft)
    return c10::str("rank ", rank_, " has left: it destroyed its process group");
  return "";
}

bool Peer::has_taken_all() {
  const std::lock_guard lock(mutex_);
  return lane_to(*control_, own_rank_).passed.load(std::memory_order_acquire) ==
         freed_ + sent_.size();
}

}  // namespace fsdp::internal
