#include "device_mesh/peer_memory/peer_meeting.h"

#include "device_mesh/peer_memory/peer_memory.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <utility>

namespace fsdp::internal {
namespace {

constexpr char kCould[] = "yes";

std::string word_key(int64_t rank) { return "peer_memory/" + std::to_string(rank); }

void warn(int64_t rank, const std::string& reason) {
  TORCH_WARN("rank ", rank,
             " shares no memory with the other ranks of its host, so these "
             "communicate over Gloo, which is slower: ",
             reason, ". FSDP_PEER_MEMORY=off asks for that without this warning");
}

}  // namespace

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
