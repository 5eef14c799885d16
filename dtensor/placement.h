// How a DTensor lies along one mesh dimension: cut into chunks (Shard), into parts of
// stated sizes (RaggedShard) or whole on one coordinate (Owned), copied (Replicate), or
// as terms still to be reduced (Partial).
//
//   std::vector<fsdp::Placement> placements = {fsdp::Shard{0}, fsdp::Replicate{}};
#pragma once

#include "device_mesh/api.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <variant>
#include <vector>

namespace fsdp {

// How many units of a dimension each coordinate of a mesh dimension has, where a
// placement says so (RaggedShard and Owned below). A list that costs a pointer: equal
// lists are one record, which is kept until the process ends, so they compare by address.
// Threads may share them.
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

// Chunk i of torch.chunk of tensor dimension `dim` lies on mesh coordinate i; trailing
// chunks may be empty.
//
// With `outer` and `unit` (both at least 1) the dimension counts as `outer` blocks of
// atoms of `unit` elements: of every block each coordinate has torch.chunk of the atoms,
// whole. Their product divides the dimension.
//
//   fsdp::Shard heads{.dim = 0, .unit = 8};   // 7 heads of 8 rows on two ranks: 4 heads and 3
//   fsdp::Shard qkv{.dim = 0, .outer = 3};    // query, key and value in one: a part of each
//
// With `local_units`, which a RaggedShard or Owned sets, coordinate i has local_units[i]
// of as many equal units as they add up to, and `outer` and `unit` are 1.
struct Shard {
  int64_t dim = 0;
  int64_t outer = 1;
  int64_t unit = 1;
  LocalUnits local_units = {};
  bool operator==(const Shard&) const = default;
};

// Dimension `dim` in as many equal units as all coordinates together have, which divide
// it; coordinate i has the next local_units[i] of them, one value per coordinate. Sizes
// in elements are such units, too.
//
//   fsdp::RaggedShard{.dim = 0, .local_units = {3, 0, 1}};   // of 8 rows: 6, 0 and 2
struct RaggedShard {
  int64_t dim = 0;
  std::vector<int64_t> local_units;
};

// All of it on one coordinate: what RaggedShard gives with one unit there. Owned{} leaves
// to fully_shard on which; anything else wants to be told.
struct Owned {
  static constexpr int64_t kPlanned = -1;
  int64_t coordinate = kPlanned;
};

struct Replicate {
  bool operator==(const Replicate&) const = default;
};

// The value is the reduction of all coordinates' tensors.
struct Partial {
  enum class Op { kSum, kAvg, kMin, kMax, kProduct };
  Op op = Op::kSum;
  bool operator==(const Partial&) const = default;
};

class FSDP_API Placement {
 public:
  Placement(Shard shard) : value_(shard) {}
  Placement(const RaggedShard& ragged)
      : value_(Shard{.dim = ragged.dim, .local_units = LocalUnits(ragged.local_units)}) {}
  Placement(Owned owned) : value_(Shard{.local_units = LocalUnits::of_owner(owned.coordinate)}) {}
  Placement(Replicate replicate) : value_(replicate) {}
  Placement(Partial partial) : value_(partial) {}

  bool is_shard() const { return std::holds_alternative<Shard>(value_); }
  bool is_shard(int64_t dim) const { return is_shard() && std::get<Shard>(value_).dim == dim; }
  bool is_replicate() const { return std::holds_alternative<Replicate>(value_); }
  bool is_partial() const { return std::holds_alternative<Partial>(value_); }
  // Whether the chunks are not those of torch.chunk of the dimension itself.
  bool is_interleaved() const {
    return is_shard() && (shard().outer > 1 || shard().unit > 1 || is_ragged());
  }
  bool is_ragged() const { return is_shard() && shard().local_units.has_value(); }
  // Whether one coordinate has everything.
  bool is_owned() const { return is_ragged() && shard().local_units.owner().has_value(); }
  // Whether it can cut what another mesh dimension left of its dimension, however much
  // that is.
  bool can_lie_inside_a_cut() const { return !is_interleaved() || is_owned(); }
  const Shard& shard() const { return std::get<Shard>(value_); }  // REQUIRES: is_shard()
  int64_t shard_dim() const { return shard().dim; }               // REQUIRES: is_shard()
  [[nodiscard]] Placement along(
      int64_t dim) const;  // the same cut of another dimension. REQUIRES: is_shard()
  Partial::Op partial_op() const { return std::get<Partial>(value_).op; }  // REQUIRES: is_partial()

  bool operator==(const Placement&) const = default;
  size_t hash() const;

 private:
  std::variant<Shard, Replicate, Partial> value_;
};

// "Shard(0)", "Shard(0, outer=3, unit=8)", "RaggedShard(0, local_units=[3, 0, 1])",
// "Owned(2)" ("Owned(2, dim=1)"), "Replicate()", "Partial(sum)"
FSDP_API std::string to_string(const Placement& placement);
FSDP_API std::ostream& operator<<(std::ostream& out, const Placement& placement);

}  // namespace fsdp

template <>
struct std::hash<fsdp::Placement> {
  size_t operator()(const fsdp::Placement& placement) const { return placement.hash(); }
};
