#include "fully_shard/transport/shared_shards.h"

#include "device_mesh/collectives/issue_log.h"
#include "device_mesh/peer_memory/peer_channel.h"
#include "fully_shard/transport/packed_layout.h"
#include "fully_shard/transport/shard_places.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <exception>
#include <new>
#include <utility>

namespace fsdp::internal {
namespace {

// Messages of shards have numbers of their own among those of a channel.
constexpr uint64_t kFirstNumber = uint64_t{1} << 62;

// The memory in which a rank tells the others of its shards of one unit: a line of words
// (shard_versions.h), and behind it the table of what it has written last. A version that
// is kept for late ranks has a head of its own, with its table behind it.

// The first bytes of a block.
struct BlockHead {
  static constexpr int64_t kBytes = 256;
  std::array<std::atomic<uint64_t>, VersionWord::kCount> words;
  int64_t bytes, table;  // of ShardsToShare
};
static_assert(sizeof(BlockHead) <= BlockHead::kBytes);

// The first bytes of a kept version. Its table is behind them.
struct KeptHead {
  static constexpr int64_t kBytes = 64;
  uint64_t place;
};
static_assert(sizeof(KeptHead) <= KeptHead::kBytes);

const BlockHead& block_head(const char* block) {
  return *reinterpret_cast<const BlockHead*>(block);
}
BlockHead& block_head(char* block) { return *reinterpret_cast<BlockHead*>(block); }

// Of another rank's block.
class PeersLine {
 public:
  explicit PeersLine(const char* block) : head_(block_head(block)) {}
  uint64_t load(size_t word) const { return head_.words[word].load(std::memory_order_acquire); }
  static void read_fence() { std::atomic_thread_fence(std::memory_order_acquire); }

 private:
  const BlockHead& head_;
};

class OwnLine {
 public:
  explicit OwnLine(char* block) : head_(block_head(block)) {}
  void store(size_t word, uint64_t value) {
    head_.words[word].store(value, std::memory_order_relaxed);
  }
  void release(size_t word, uint64_t value) {
    head_.words[word].store(value, std::memory_order_release);
  }
  static void fence() { std::atomic_thread_fence(std::memory_order_seq_cst); }

 private:
  BlockHead& head_;
};

}  // namespace

SharedShards::SharedShards(Options options)
    : options_(std::move(options)),
      block_(options_.channel->memory().memory(BlockHead::kBytes + table_bytes())),
      places_({options_.channel, options_.gathers, options_.number, options_.patience_to_begin},
              options_.shards) {
  std::memset(block_.mutable_data_ptr(), 0, block_.nbytes());
  new (own_block())
      BlockHead{.words = {}, .bytes = options_.shards.bytes, .table = options_.shards.table};
  OwnLine line(own_block());
  versions_.open(line, {.place = places_.word()});
  versions_.begin(line);
  const auto& channel = *options_.channel;
  const auto number = kFirstNumber + options_.number;
  for (int64_t rank = 0; rank < channel.size(); ++rank) {
    if (rank == options_.gathers.rank()) continue;
    channel.send(rank, number, {}, block_);
    peers_.push_back({rank, channel.receive(rank, number)});
  }
}

// Ranks that are behind may want what was kept for them as long as they have the block.
SharedShards::~SharedShards() {
  try {
    for (const auto& peer : peers_) {
      if (peer.block == nullptr) options_.channel->drop(peer.rank, kFirstNumber + options_.number);
    }
    std::vector<at::Tensor> others;
    if (!places_.are_in_common()) others.push_back(places_.place());
    for (auto& kept : kept_) {
      others.push_back(std::move(kept.head));
      others.push_back(std::move(kept.place));
    }
    if (!others.empty()) options_.channel->memory().keep_while_read(block_, std::move(others));
  } catch (const std::exception&) {
    // A rank is gone, and with it whoever would read or have sent.
  }
}

char* SharedShards::own_block() const { return static_cast<char*>(block_.data_ptr()); }

int64_t SharedShards::table_bytes() const {
  return align_up(options_.shards.table * static_cast<int64_t>(sizeof(uint64_t)));
}

void SharedShards::await_block(Peer& peer) {
  if (peer.block != nullptr) return;
  if (!peer.coming->isCompleted())
    await_peer(options_.gathers, peer.rank, peer.coming,
               "read of shards that a rank has not made yet");
  const auto* const block = static_cast<const char*>(peer.coming->message().body.const_data_ptr());
  const auto& head = block_head(block);
  if (head.bytes != options_.shards.bytes || head.table != options_.shards.table)
    report_other_models(options_.gathers, options_.shards.bytes, peer.rank, head.bytes);
  peer.block = block;
}

// Runs whose versions it reads no more; 0 where it has not made its shards yet.
uint64_t SharedShards::past_of(Peer& peer) {
  if (peer.block == nullptr && !peer.coming->isCompleted()) return 0;
  await_block(peer);
  return PeersLine(peer.block).load(VersionWord::kPast);
}

bool SharedShards::is_common_free() {
  return places_.has_common() && !places_.are_in_common() &&
         std::none_of(kept_.begin(), kept_.end(),
                      [this](const Kept& kept) { return kept.place.is_same(places_.common()); });
}

// The values as they are stay where they are, and this rank goes on elsewhere; where
// pointers to them may be out, a copy stays. Returns where its head lies.
uint64_t SharedShards::keep() {
  auto head = options_.channel->memory().memory(KeptHead::kBytes + table_bytes());
  auto* const first = static_cast<char*>(head.mutable_data_ptr());
  auto place = versions_.is_exposed()
                   ? places_.copy()
                   : places_.move(is_common_free() ? places_.common() : places_.new_place());
  new (first) KeptHead{.place = places_.word_of(place)};
  std::memcpy(first + KeptHead::kBytes, own_block() + BlockHead::kBytes,
              static_cast<size_t>(table_bytes()));
  const auto told = PeerMemory::block_of(head).word();
  kept_.push_back({versions_.version().run, std::move(head), std::move(place)});
  return told;
}

// Copies that no rank can want any more.
void SharedShards::forget_kept() {
  if (kept_.empty()) return;
  uint64_t least = ~uint64_t{0};
  for (auto& peer : peers_) least = std::min(least, past_of(peer));
  std::erase_if(kept_, [least](const Kept& kept) { return kept.run < least; });
}

// Waits for ranks that are several runs behind.
void SharedShards::await_room() {
  for (auto& peer : peers_) {
    if (!versions_.may_want_oldest(past_of(peer))) continue;
    await_block(peer);
    const auto has_room = [this, line = PeersLine(peer.block)] {
      return !versions_.may_want_oldest(line.load(VersionWord::kPast));
    };
    await_peer(options_.gathers, peer.rank, options_.channel->wait_until(peer.rank, has_room),
               "write of shards that a rank has not read for long");
  }
}

bool SharedShards::is_wanted_by_others() {
  return std::any_of(peers_.begin(), peers_.end(),
                     [this](Peer& peer) { return versions_.may_want_this(past_of(peer)); });
}

void SharedShards::open_run() {
  OwnLine line(own_block());
  versions_.pass(line);
  options_.channel->memory().wake_others();
  await_room();
  if (!versions_.is_published()) {
    options_.patience->await(*options_.channel, [this] { return !is_wanted_by_others(); });
  }
  forget_kept();
  const bool keeps = !versions_.is_published() && is_wanted_by_others();
  const uint64_t kept = keeps ? keep() : 0;
  if (!keeps && !versions_.is_exposed() && is_common_free()) places_.move(places_.common());
  versions_.open(line, {.place = places_.word(), .kept = kept, .said = said_});
  options_.channel->memory().wake_others();
}

void SharedShards::begin_write(c10::function_ref<std::string()> unit) {
  TORCH_INTERNAL_ASSERT(reads_in_place_ == 0);
  if (!versions_.is_in_run()) open_run();
  OwnLine line(own_block());
  versions_.begin(line);
  check_not_read(unit);
}

// Some rank could be reading what this operator is about to write.
void SharedShards::check_not_read(c10::function_ref<std::string()> unit) const {
  if (versions_.is_first_of_run()) return;
  const auto reader = std::find_if(peers_.begin(), peers_.end(), [this](const Peer& peer) {
    return peer.block != nullptr &&
           versions_.was_read(PeersLine(peer.block).load(VersionWord::kRead));
  });
  if (reader == peers_.end()) return;
  const auto& log = *options_.gathers.log();
  const auto other = log.ranks()[static_cast<size_t>(reader->rank)];
  end_collectives(options_.gathers,
                  c10::str("write of the shards of ", unit(), " failed on rank ", log.global_rank(),
                           ": rank ", other, " has read them as ", versions_.version().count - 2,
                           " write operators made them, and this rank has not. Between two writes "
                           "that no backward separates either all ranks read the unit or none"));
}

void SharedShards::end_write(const ShardValues& values) {
  if (values.word != 0) {
    TORCH_INTERNAL_ASSERT(static_cast<int64_t>(values.table.size()) == options_.shards.table);
    std::copy(values.table.begin(), values.table.end(),
              reinterpret_cast<uint64_t*>(own_block() + BlockHead::kBytes));
  }
  said_ = values.word;
  end_operator();
}

void SharedShards::end_operator() {
  OwnLine line(own_block());
  versions_.end(line, said_);
  options_.channel->memory().wake_others();
}

void SharedShards::publish() {
  const auto copy = keep();
  OwnLine line(own_block());
  versions_.publish(line, copy, said_);
  options_.channel->memory().wake_others();
}

// What this rank wants to read; the next operator begins another run. One that threw has
// not told that it is over.
ShardVersion SharedShards::close_version() {
  if (versions_.is_writing()) end_operator();
  if (versions_.is_exposed() && !versions_.is_published()) publish();
  versions_.close();
  return versions_.version();
}

void SharedShards::end_of_backward() {
  close_version();
  forget_kept();
}

void SharedShards::give_out() {
  if (versions_.is_exposed()) return;
  if (!versions_.is_writing() && !versions_.is_published()) publish();
  OwnLine line(own_block());
  versions_.expose(line);
}

std::unique_ptr<SharedRead> SharedShards::read(std::string what, ReadBy by) {
  options_.gathers.log()->check_usable(what);
  if (setting_ != PeerMemorySetting::kOn) by = ReadBy::kCopy;
  return std::make_unique<SharedRead>(shared_from_this(), std::move(what), by);
}

GatheredRows SharedRead::wait() {
  auto& shards = *shards_;
  version_ = shards.close_version();
  if (by_ == SharedShards::ReadBy::kInPlace && shards.places_.are_in_common()) {
    OwnLine line(shards.own_block());
    shards.versions_.read(line);
  }
  const Source own{static_cast<const char*>(shards.bytes().const_data_ptr()),
                   shards.own_block() + BlockHead::kBytes, shards.said_,
                   shards.places_.are_in_common() && !shards.versions_.is_exposed()};
  sources_.assign(shards.peers_.size() + 1, own);
  for (auto& peer : shards.peers_) sources_[static_cast<size_t>(peer.rank)] = find(peer);
  std::vector<const char*> rows;
  std::vector<NoticeWords> words;
  for (const auto& source : sources_) {
    rows.push_back(source.values);
    words.push_back({.agreement = source.said});
  }
  return {std::move(rows), std::move(words), shards_};
}

std::unique_ptr<ReadInPlace> SharedRead::in_place() const {
  const bool can = by_ == SharedShards::ReadBy::kInPlace &&
                   std::all_of(sources_.begin(), sources_.end(),
                               [](const Source& source) { return source.is_in_common; });
  return can ? std::make_unique<ReadInPlace>(shards_) : nullptr;
}

SharedRead::Source SharedRead::find(SharedShards::Peer& peer) const {
  shards_->await_block(peer);
  const auto& options = shards_->options_;
  PeersLine line(peer.block);
  while (true) {
    const auto seen = look(line, version_);
    switch (seen.found) {
      case Found::kLive:
        return {shards_->places_.at(peer.rank, seen.place), peer.block + BlockHead::kBytes,
                seen.said, ShardPlaces::is_common(seen.place), peer.block};
      case Found::kKept:
        return kept_at(peer.rank, options.channel->block_of(peer.rank, BlockRef(seen.place)),
                       seen.said);
      case Found::kNever:
        report(peer);
      case Found::kNotYet:
        break;
    }
    const auto has_come = [line, version = version_] {
      return look(line, version).found != Found::kNotYet;
    };
    await_peer(options.gathers, peer.rank, options.channel->wait_until(peer.rank, has_come),
               version_in_words());
  }
}

SharedRead::Source SharedRead::kept_at(int64_t rank, const char* head, uint64_t said) const {
  const auto place = reinterpret_cast<const KeptHead*>(head)->place;
  return {shards_->places_.at(rank, place), head + KeptHead::kBytes, said, /*is_in_common=*/false};
}

// The first operator made them.
std::string SharedRead::version_in_words() const {
  return c10::str(what_, ", as ", version_.count - 1, " write operators made them,");
}

void SharedRead::report(const SharedShards::Peer& peer) const {
  const auto& log = *shards_->options_.gathers.log();
  const PeersLine line(peer.block);
  end_collectives(
      shards_->options_.gathers,
      c10::str(what_, " failed on rank ", log.global_rank(),
               ": the ranks have not written them alike. Rank ", log.global_rank(),
               " wants them as ", version_.count - 1, " write operators made them in ",
               version_.run, " runs of writes; rank ", log.ranks()[static_cast<size_t>(peer.rank)],
               " has begun ", line.load(VersionWord::kBegun) - 1, " in ",
               line.load(VersionWord::kRun),
               " runs. Every rank must write a unit by the same operators, and between two "
               "writes that no backward separates either all ranks read the unit or none"));
}

bool SharedRead::was_right() {
  tables_.assign(sources_.size(), {});
  bool all = true;
  for (size_t rank = 0; rank < sources_.size(); ++rank) {
    const auto& source = sources_[rank];
    if (source.said != shards_->said_ && source.said != 0) {
      auto& table = tables_[rank];
      table.resize(static_cast<size_t>(shards_->options_.shards.table));
      std::memcpy(table.data(), source.table, table.size() * sizeof(uint64_t));
    }
    if (source.live_in == nullptr) continue;
    PeersLine line(source.live_in);
    all = all && still_live(line, version_);
  }
  return all;
}

}  // namespace fsdp::internal
