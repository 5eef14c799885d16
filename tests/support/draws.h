// Choices at random, all from one seed.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <random>
#include <vector>

namespace fsdp::testing {

class Draws {
 public:
  explicit Draws(uint64_t seed) : random_(seed * 0x9e3779b97f4a7c15ULL + 1) {}

  int between(int low, int high) {
    return low + static_cast<int>(number(static_cast<uint64_t>(high - low + 1)));
  }
  uint64_t number(uint64_t below) { return random_() % below; }
  bool chance(int percent) { return between(1, 100) <= percent; }
  template <class T>
  T pick(std::initializer_list<T> values) {
    return values.begin()[between(0, static_cast<int>(values.size()) - 1)];
  }
  template <class T>
  const T& pick(const std::vector<T>& values) {
    return values[static_cast<size_t>(between(0, static_cast<int>(values.size()) - 1))];
  }
  // Of 0, 1, ..., count - 1.
  std::vector<int64_t> permutation(int64_t count) {
    std::vector<int64_t> order(static_cast<size_t>(count));
    for (size_t i = 0; i < order.size(); ++i) {
      const auto at = static_cast<size_t>(number(i + 1));
      order[i] = order[at];
      order[at] = static_cast<int64_t>(i);
    }
    return order;
  }

 private:
  std::mt19937_64 random_;
};

}  // namespace fsdp::testing
