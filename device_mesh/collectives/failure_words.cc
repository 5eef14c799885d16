#include "device_mesh/collectives/failure_words.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <thread>

namespace fsdp::internal {

void exchange_failure_words(
    c10d::Store& store, const std::string& topic, int64_t own, const std::string& word,
    const std::vector<int64_t>& ranks,
    const std::function<void(int64_t rank, const std::optional<std::string>& word)>& visit) {
  constexpr auto kGrace = std::chrono::seconds(1);
  const auto key = [&topic](int64_t rank) { return topic + "/" + std::to_string(rank); };
  store.set(key(own), std::vector<uint8_t>(word.begin(), word.end()));
  const auto deadline = std::chrono::steady_clock::now() + kGrace;
  for (const auto rank : ranks) {
    bool left = store.check({key(rank)});
    while (!left && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      left = store.check({key(rank)});
    }
    if (!left) {
      visit(rank, std::nullopt);
      continue;
    }
    const auto bytes = store.get(key(rank));
    visit(rank, std::string(bytes.begin(), bytes.end()));
  }
}

}  // namespace fsdp::internal
