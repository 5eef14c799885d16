// How many units of a dimension each coordinate of a mesh dimension has, where a
// placement says so (RaggedShard and Owned in dtensor/placement.h).
#pragma once

#include "device_mesh/api.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace fsdp {

// A list that costs a pointer: equal lists are one record, which is kept until the
// process ends, so they compare by address. Threads may share them.
class FSDP_API LocalUnits {
 public:
  LocalUnits() = default;  // none
  // Divided by their greatest common divisor.
  explicit LocalUnits(const std::vector<int64_t>& units);
  // One unit at that coordinate, none at those after it, however many they are. Of a
  // negative one: a list that cannot cut.
  static LocalUnits of_owner(int64_t coordinate);

  bool has_value() const { return units_ != nullptr; }
  // None negative or beyond 2^40, and not only zeros. This and the rest REQUIRES:
  // has_value().
  bool can_cut() const;
  int64_t at(int64_t coordinate) const;      // 0 behind the end of the list
  int64_t before(int64_t coordinate) const;  // what those in front of it have together
  int64_t total() const;
  int64_t most() const;
  int64_t coordinates() const { return static_cast<int64_t>(units_->size()); }
  // The coordinate that has everything, if the list is of_owner() of one.
  std::optional<int64_t> owner() const;
  std::string to_string() const;  // "[3, 0, 1]"
  size_t hash() const;            // of the values: the same in other processes

  bool operator==(const LocalUnits&) const = default;

 private:
  const std::vector<int64_t>* units_ = nullptr;
};

}  // namespace fsdp
