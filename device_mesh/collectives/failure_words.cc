#include "device_mesh/collectives/failure_words.h"

#include "device_mesh/internal/deadline.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

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
  std::string topic;
  int64_t own;
  std::string word;
  std::vector<int64_t> ranks;
  std::shared_ptr<Heard> heard;

  std::string key(int64_t rank) const { return topic + "/" + std::to_string(rank); }

  bool operator()() const {
    store->set(key(own), std::vector<uint8_t>(word.begin(), word.end()));
    const auto deadline = std::chrono::steady_clock::now() + kGrace;
    for (const auto rank : ranks) {
      bool left = store->check({key(rank)});
      while (!left && std::chrono::steady_clock::now() < deadline) {
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
    const c10::intrusive_ptr<c10d::Store>& store, const std::string& topic, int64_t own,
    const std::string& word, const std::vector<int64_t>& ranks,
    const std::function<void(int64_t rank, const std::optional<std::string>& word)>& visit) {
  const auto heard = std::make_shared<Heard>();
  std::exception_ptr gone;
  try {
    call_with_deadline(kGrace + kAnswer, Exchange{store, topic, own, word, ranks, heard});
  } catch (const std::exception&) {
    gone = std::current_exception();
  }
  const std::lock_guard lock(heard->mutex);
  TORCH_CHECK_WITH(DistNetworkError, gone || !heard->words.empty(), "the store does not answer");
  for (const auto rank : ranks) {
    const auto found = heard->words.find(rank);
    if (found != heard->words.end()) visit(rank, found->second);
  }
  if (gone) std::rethrow_exception(gone);
}

}  // namespace fsdp::internal
