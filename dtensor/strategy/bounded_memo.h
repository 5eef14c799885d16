// What was worked out before, by a key of whole numbers. Bounded: a full memo forgets
// everything. Threads may share one. Values are found by what their keys say, not by
// whose they are, so a memo keeps neither meshes nor their groups alive. No torch here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace fsdp::internal {

using MemoKey = std::vector<int64_t>;

struct MemoKeyHash {
  size_t operator()(const MemoKey& key) const {
    uint64_t hash = key.size();
    for (const int64_t number : key)
      hash = (hash ^ static_cast<uint64_t>(number)) * 0x9E3779B97F4A7C15U;
    return hash ^ (hash >> 32);
  }
};

template <class Value>
class BoundedMemo {
 public:
  explicit BoundedMemo(size_t capacity) : capacity_(capacity) {}

  // Null when it is not known.
  std::shared_ptr<const Value> find(const MemoKey& key) const {
    const std::lock_guard lock(mutex_);
    const auto it = values_.find(key);
    return it == values_.end() ? nullptr : it->second;
  }

  std::shared_ptr<const Value> remember(MemoKey key, Value value) {
    auto shared = std::make_shared<const Value>(std::move(value));
    const std::lock_guard lock(mutex_);
    if (values_.size() >= capacity_) values_.clear();
    values_.insert_or_assign(std::move(key), shared);
    return shared;
  }

  size_t size() const {
    std::lock_guard lock(mutex_);
    return values_.size();
  }

 private:
  size_t capacity_;
  mutable std::mutex mutex_;
  std::unordered_map<MemoKey, std::shared_ptr<const Value>, MemoKeyHash> values_;
};

}  // namespace fsdp::internal
