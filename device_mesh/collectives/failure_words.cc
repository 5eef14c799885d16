#include "device_mesh/collectives/failure_words.h"

#include "device_mesh/rendezvous/deadline.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <chrono>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

namespace fsdp::internal {
namespace {

constexpr auto kGrace = std::chrono::seconds(1);          // for others to fail in
constexpr auto kAnswer = std::chrono::milliseconds(500);  // for the store, beyond that

// What was heard so far, by rank; the thread that asks may be abandoned meanwhile.
struct Heard {
  std::mutex mutex;
  std::map<int64_t, std::optional<std::string>> words;
};

// Owns what it uses (deadline.h).
struct Exchange {
  c10::intrusive_ptr<c10d::Store> store;
  FailureWord own;
  std::shared_ptr<Heard> heard;

  std::string key(int64_t rank) const { return own.topic + "/" + std::to_string(rank); }
  bool is_gone(int64_t rank) const {
    return std::find(own.gone.begin(), own.gone.end(), rank) != own.gone.end();
  }

  bool operator()() const {
    store->set(key(own.own), std::vector<uint8_t>(own.word.begin(), own.word.end()));
    const auto deadline = std::chrono::steady_clock::now() + kGrace;
    for (const auto rank : own.ranks) {
      bool left = store->check({key(rank)});
      while (!left && !is_gone(rank) && std::chrono::steady_clock::now() < deadline) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        left = store->check({key(rank)});
      }
      note(rank, left);
    }
    return true;
  }

  void note(int64_t rank, bool left) const {
    std::optional<std::string> text;
    if (left) {
      const auto bytes = store->get(key(rank));
      text.emplace(bytes.begin(), bytes.end());
    }
    const std::lock_guard lock(heard->mutex);
    heard->words.emplace(rank, std::move(text));
  }
};

}  // namespace

void exchange_failure_words(
    const c10::intrusive_ptr<c10d::Store>& store, const FailureWord& left,
    const std::function<void(int64_t rank, const std::optional<std::string>& word)>& visit) {
  const auto heard = std::make_shared<Heard>();
  std::exception_ptr gone;
  try {
    call_with_deadline(kGrace + kAnswer, Exchange{store, left, heard});
  } catch (const std::exception&) {
    gone = std::current_exception();
  }
  const std::lock_guard lock(heard->mutex);
  TORCH_CHECK_WITH(DistNetworkError, gone || !heard->words.empty(), "the store does not answer");
  for (const auto rank : left.ranks) {
    const auto found = heard->words.find(rank);
    if (found != heard->words.end()) visit(rank, found->second);
  }
  if (gone) std::rethrow_exception(gone);
}

}  // namespace fsdp::internal
