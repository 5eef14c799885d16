#include "fully_shard/transport/shard_places.h"

#include "device_mesh/collectives/issue_log.h"
#include "device_mesh/peer_memory/peer_channel.h"
#include "device_mesh/peer_memory/peer_memory.h"

#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstring>
#include <exception>
#include <utility>

namespace fsdp::internal {
namespace {

// Memory in common has numbers of its own among those of a channel.
constexpr uint64_t kFirstCommon = uint64_t{3} << 61;

// `place` stays as long as a storage shows it. PeerMemory::as_sent() does not know that
// storage and copies what is sent of it, as is meant: shards are written again.
c10::DataPtr data_of(const at::Tensor& place) {
  return {place.mutable_data_ptr(), new at::Tensor(place),
          [](void* held) { delete static_cast<at::Tensor*>(held); }, c10::Device(c10::kCPU)};
}

// Empty ones may lie nowhere.
std::vector<ByteRange> not_empty(std::vector<ByteRange> ranges) {
  std::erase_if(ranges, [](const ByteRange& range) { return range.bytes == 0; });
  return ranges;
}

}  // namespace

void await_peer(const Collectives& collectives, int64_t rank, c10::intrusive_ptr<c10d::Work> work,
                const std::string& what) {
  Pending coming(collectives.group(), std::move(work));
  collectives.log()->await_apart(std::move(coming.with_peer(rank)), what);
}

bool Patience::await(const PeerChannel& channel, c10::function_ref<bool()> is_over) {
  if (is_over()) {
    was_in_vain = false;
    return true;
  }
  if (was_in_vain) return false;
  auto& memory = channel.memory();
  const auto until = std::chrono::steady_clock::now() + most;
  for (int64_t round = 0; !is_over(); ++round) {
    const bool is_vain = memory.sleeps_in(round) && channel.has_gone_ranks();
    if (is_vain || std::chrono::steady_clock::now() >= until) {
      was_in_vain = true;
      return is_over();
    }
    memory.wait_round(round, is_over);
  }
  return true;
}

void end_collectives(const Collectives& collectives, const std::string& why) {
  collectives.log()->watch([&] { C10_THROW_ERROR(DistBackendError, why); });
  TORCH_INTERNAL_ASSERT(false);
}

void report_other_models(const Collectives& collectives, int64_t bytes, int64_t peer,
                         int64_t others) {
  const auto& log = *collectives.log();
  end_collectives(collectives,
                  c10::str("the ranks have sharded other models: where rank ", log.global_rank(),
                           " has a unit of ", bytes, " bytes, rank ",
                           log.ranks()[static_cast<size_t>(peer)], " has one of ", others,
                           ". Build the same model and apply fully_shard to the "
                           "same modules in the same order on every rank"));
}

ShardPlaces::ShardPlaces(Options options, const ShardsToShare& shards)
    : options_(std::move(options)), place_bytes_(shards.bytes), own_(not_empty(shards.own)) {
  if (place_bytes_ > 0) make_or_expect_common();
  place_ = has_common() ? common_ : new_place();
  bytes_ = at::from_blob(place_.mutable_data_ptr(), {place_bytes_},
                         at::TensorOptions().dtype(at::kByte));
  bytes_.storage().set_data_ptr(data_of(place_));
  auto* const first = static_cast<char*>(place_.mutable_data_ptr());
  for (const auto& range : own_)
    std::memset(first + range.offset, 0, static_cast<size_t>(range.bytes));
}

ShardPlaces::~ShardPlaces() {
  try {
    if (coming_ && !common_.defined())
      options_.channel->drop(owner(), kFirstCommon + options_.number);
  } catch (const std::exception&) {
    // That rank is gone.
  }
}

// By one rank after another, so that no rank's memory has all models.
int64_t ShardPlaces::owner() const {
  return static_cast<int64_t>(options_.number % static_cast<uint64_t>(options_.channel->size()));
}

void ShardPlaces::make_or_expect_common() {
  const auto& channel = *options_.channel;
  const auto number = kFirstCommon + options_.number;
  if (owner() != options_.collectives.rank()) {
    coming_ = channel.receive(owner(), number);
    options_.patience->await(channel, [this] { return coming_->isCompleted(); });
    return;
  }
  common_ = new_place();
  for (int64_t rank = 0; rank < channel.size(); ++rank) {
    if (rank != owner()) channel.send(rank, number, {}, common_);
  }
}

bool ShardPlaces::has_common() {
  if (!common_.defined() && coming_ && coming_->isCompleted()) take_common();
  return common_.defined();
}

void ShardPlaces::take_common() {
  auto memory = coming_->message().body;
  if (memory.numel() != place_bytes_)
    report_other_models(options_.collectives, place_bytes_, owner(), memory.numel());
  common_ = std::move(memory);
}

at::Tensor ShardPlaces::new_place() const {
  return options_.channel->memory().memory(place_bytes_);
}

uint64_t ShardPlaces::word_of(const at::Tensor& place) const {
  return common_.defined() && place.is_same(common_) ? kCommon : PeerMemory::block_of(place).word();
}

const char* ShardPlaces::at(int64_t rank, uint64_t word) {
  if (!is_common(word)) return options_.channel->block_of(rank, BlockRef(word));
  if (!has_common()) {  // it is on its way, since that rank has it
    await_peer(options_.collectives, owner(), coming_, "memory in which all ranks have shards");
    take_common();
  }
  return static_cast<const char*>(common_.const_data_ptr());
}

void ShardPlaces::copy_own(const at::Tensor& to) const {
  auto* const target = static_cast<char*>(to.mutable_data_ptr());
  const auto* const source = static_cast<const char*>(place_.const_data_ptr());
  for (const auto& range : own_)
    std::memcpy(target + range.offset, source + range.offset, static_cast<size_t>(range.bytes));
}

at::Tensor ShardPlaces::move(const at::Tensor& place) {
  copy_own(place);
  bytes_.storage().set_data_ptr(data_of(place));
  return std::exchange(place_, place);
}

at::Tensor ShardPlaces::copy() const {
  auto made = new_place();
  copy_own(made);
  return made;
}

}  // namespace fsdp::internal
