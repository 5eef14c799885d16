// A hash of the scalars, C++ numbers, that operators mixed into a DTensor which comes
// from sharded parameters (DTensorMeta::scalars). A rank that computes its part with a
// number of its own, `w * own.max().item<double>()`, would give the others a value that
// no rank means. So each scalar is mixed into the hash, at the cost of a multiplication,
// and the hashes of all ranks are compared when the value becomes whole, by a word of
// that collective's notice (scalar_agreement.h). What is never made whole may differ.
//
// A rank's writes to a parameter itself may be of other operators and numbers than the
// others' as long as they come to the same: entries have none. Nor does the base of a
// view have what is written to the view.
#pragma once

#include <array>
#include <cstdint>

namespace fsdp::internal {

struct ScalarHash {
  uint64_t hash = 0;  // 0: none
  // The operators that took the last scalars other than 1, the latest first; null: no
  // more.
  std::array<const char*, 3> taken_by = {};

  void take(uint64_t bits) {
    uint64_t mixed = (hash ^ bits) * 0x9e3779b97f4a7c15ull;
    mixed ^= mixed >> 32;
    hash = mixed > kReserved ? mixed : mixed + kReserved + 1;
  }
  void join(const ScalarHash& other) {
    if (other.hash == 0 || other.hash == hash) return;
    if (hash == 0) {
      hash = other.hash;
    } else {
      take(other.hash);
    }
    if (taken_by[0] == nullptr) {
      taken_by = other.taken_by;
    } else if (other.taken_by[0] != nullptr) {
      note_taker(other.taken_by[0]);
    }
  }
  // `op` lives on.
  void note_taker(const char* op) {
    if (taken_by[0] != op) taken_by = {op, taken_by[0], taken_by[1]};
  }

  // Words that are no hash (scalar_agreement.cc).
  static constexpr uint64_t kReserved = 2;
};

}  // namespace fsdp::internal
