// Holds a running program against the reference model of residency: after every touch
// the same bytes are unsharded, and as many gathers and reductions have left.
//
//   ResidencyOracle oracle(mesh, units);      // after fully_shard; listens until it dies
//   ...
//   oracle.check_counts();
//   if (oracle.difference()) ...
#pragma once

#include "device_mesh/device_mesh.h"
#include "fully_shard/counters.h"
#include "fully_shard/units/unit_events.h"
#include "tests/fully_shard/random_programs/custom_calls.h"
#include "tests/fully_shard/random_programs/residency_model.h"
#include "tests/fully_shard/random_programs/unit_turn.h"

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace fsdp::testing {

class ResidencyOracle final : public internal::UnitObserver {
 public:
  struct ObservedUnit {
    const internal::Unit* unit;
    std::string name;
    ResidencyModel::Spec spec;
    CustomCalls calls = {};
    bool keeps_pieces = false;  // and then gathers these, which no custom function does
  };

  // Of all units of the mesh's process group that are used while it lives; parents by
  // position. Local.
  ResidencyOracle(const DeviceMesh& mesh, const std::vector<ObservedUnit>& units);
  ResidencyOracle(const ResidencyOracle&) = delete;
  ResidencyOracle& operator=(const ResidencyOracle&) = delete;

  ResidencyModel& model() { return model_; }
  // Gathers and reductions so far, and calls of custom functions for them.
  void check_counts();
  // The first difference, with the events before it.
  const std::optional<std::string>& difference() const { return difference_; }

  // Since the last call; for finding steps that repeat.
  std::vector<UnitTurn> take_turns();
  int64_t unused_prefetches() const;

  void touched(const internal::Unit& unit, internal::Pass pass) override;
  void gradient_arrived(const internal::Unit& unit) override;
  void unshard_issued(const internal::Unit& unit) override;
  void unsharded_explicitly(const internal::Unit& unit) override;
  void resharded_explicitly(const internal::Unit& unit) override;
  void entry_written(const internal::Unit& unit) override;
  void member_written(const internal::Unit& unit) override;
  void backward_ended() override;
  void backward_aborted() override;

 private:
  // The unit's number in the model, or -1.
  int note(const char* event, const internal::Unit& unit);
  void begin_turn(int unit, internal::Pass pass);
  std::set<int> on_the_way() const;
  Counters since_start() const;  // events only
  void check_bytes();
  void check_calls(size_t unit, const Counters& events);
  void differ(const std::string& what);

  DeviceMesh mesh_;
  Counters start_;
  internal::ObserveUnits observe_{*this};
  ResidencyModel model_;
  std::map<const internal::Unit*, int> numbers_;
  std::vector<ObservedUnit> units_;
  std::vector<int64_t> bytes_;  // learned when the unit is first resident; before that -1
  std::deque<std::string> events_;
  std::vector<UnitTurn> turns_;
  std::optional<std::string> difference_;
};

}  // namespace fsdp::testing
