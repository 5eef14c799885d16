// A reference model of residency and reductions, written from the rules of DESIGN.md
// ("turns", "scopes", "backward") and from nothing else: which units are unsharded after
// each event, how many gathers that needs, and how many reductions leave. Prefetching
// changes none of it. Plain integers; units of one process group.
//
//   ResidencyModel model;
//   const int root = model.add_unit({.parent = -1});
//   const int block = model.add_unit({.parent = root, .params = {{.dtype = 0}}});
//   model.touched(block, ResidencyModel::Touch::kTraining);
//   model.needed_gathers();      // {1, 1}
//   model.resident();            // {block}
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <set>
#include <vector>

namespace fsdp::testing {

class ResidencyModel {
 public:
  enum class Touch { kTraining, kInference, kRecompute, kBackward };

  struct Param {
    int id = 0;
    int dtype = 0;
    bool trainable = true;
    bool unsynchronized = false;  // trained by a backward without synchronisation
    bool summed = false;          // hybrid sharding: a sum over the shards may be kept
  };

  struct Spec {
    int parent = -1;
    std::optional<bool> reshard_after_forward = {};
    bool reshard_after_backward = true;
    std::vector<Param> params = {};
  };

  // Where the rules leave a case open: what was done must lie between the two.
  struct Count {
    int64_t least = 0, most = 0;
    bool admits(int64_t value) const { return least <= value && value <= most; }
    void add(const Count& other) { least += other.least, most += other.most; }
  };

  // Gives the unit's number, by which others name it as their parent, before or after.
  int add_unit(Spec spec);
  void set_synchronizes(int unit, bool synchronizes) { at(unit).synchronizes = synchronizes; }
  // Hybrid sharding without an all-reduce: reductions leave sums over the shards.
  void set_keeps_sums(int unit, bool keeps) { at(unit).keeps_sums = keeps; }
  void set_trainable(int unit, int param_id, bool trainable);

  void touched(int unit, Touch touch);
  void gradient_arrived(int unit) { at(unit).has_gradient = true; }
  void unshard_issued(int unit);
  void unsharded_explicitly(int unit);
  void resharded_explicitly(int unit);
  void entry_written(int unit);
  void member_written(int unit) { at(unit).dirty = true; }
  void pending_gradients_dropped(int unit);
  void backward_ended();
  void backward_aborted();

  // Gathers that were used, or asked for by hand.
  const Count& needed_gathers(int unit) const { return at(unit).gathers; }
  Count needed_gathers() const;
  // But for late ones.
  const Count& reductions(int unit) const { return at(unit).reductions; }
  Count reductions() const;
  std::set<int> resident() const;

 private:
  enum class Kind { kNone, kTraining, kInference, kBackward };
  enum class Presence { kAbsent, kGathering, kResident };  // kGathering: by hand, not waited for
  enum class Turn { kWaiting, kInTurn, kOver };
  enum class Debt { kNone, kPossible, kOwes };

  // How often an ancestor that is to reshard after forward became current.
  struct Rounds {
    int now = 0, last = 0;
    void end();
  };

  struct Unit {
    Spec spec;
    bool synchronizes = true, keeps_sums = false;
    Presence presence = Presence::kAbsent;
    Turn turn = Turn::kWaiting;
    bool dirty = false;
    Debt debt = Debt::kNone;
    bool touched_in_backward = false, has_gradient = false;
    std::array<Rounds, 4> rounds = {};  // by kind
    Count gathers = {}, reductions = {};
    // Of a root only.
    Kind kind = Kind::kNone;
    int current = -1, first = -1;
  };

  Unit& at(int unit) { return units_[static_cast<size_t>(unit)]; }
  const Unit& at(int unit) const { return units_[static_cast<size_t>(unit)]; }
  int root_of(int unit) const;
  bool is_at_or_below(int unit, int ancestor) const;
  bool are_related(int a, int b) const;
  bool reshards_after_forward(int unit) const;
  bool reshards_now(int unit) const;
  bool reshards_though_ancestor(int unit) const;
  std::vector<int> units_of(int root) const;

  void change_kind(int root, Kind kind, int touched);
  void become_current(int root, int unit);
  void end_turns(int touched);
  void empty(int unit);
  void end_rounds(int root, Kind kind);
  bool takes_part(int root) const;
  Count dtypes_to_reduce(int unit) const;
  bool keeps_unsynchronized(int unit) const;
  void forget_kept(int unit);
  void keep_sums(int unit);
  void reduce(int unit);

  std::vector<Unit> units_;
};

}  // namespace fsdp::testing
