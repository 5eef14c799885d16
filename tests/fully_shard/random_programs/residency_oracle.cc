#include "tests/fully_shard/random_programs/residency_oracle.h"

#include "fully_shard/params/fsdp_param_group.h"
#include "tests/support/resident_bytes.h"

#include <sstream>
#include <utility>

namespace fsdp::testing {
namespace {

constexpr size_t kEventsKept = 60;

std::string describe(const std::string& what, int64_t value, const ResidencyModel::Count& count) {
  return what + ": " + std::to_string(value) + ", by the rules " + std::to_string(count.least) +
         " to " + std::to_string(count.most);
}

ResidencyModel::Touch touch_of(internal::Pass pass) {
  switch (pass) {
    case internal::Pass::kTraining:
    case internal::Pass::kCheckpointed:
      return ResidencyModel::Touch::kTraining;
    case internal::Pass::kInference:
      return ResidencyModel::Touch::kInference;
    case internal::Pass::kRecompute:
      return ResidencyModel::Touch::kRecompute;
    case internal::Pass::kBackward:
      return ResidencyModel::Touch::kBackward;
  }
  return ResidencyModel::Touch::kTraining;
}

const char* name_of(internal::Pass pass) {
  constexpr const char* names[] = {"training", "inference", "checkpointed", "recompute",
                                   "backward"};
  return names[static_cast<size_t>(pass)];
}

}  // namespace

ResidencyOracle::ResidencyOracle(const DeviceMesh& mesh, const std::vector<ObservedUnit>& units)
    : mesh_(mesh), start_(counters(mesh)) {
  for (const auto& unit : units) {
    numbers_[unit.unit] = model_.add_unit(unit.spec);
    units_.push_back(unit);
    bytes_.push_back(-1);
  }
}

int ResidencyOracle::note(const char* event, const internal::Unit& unit) {
  const auto found = numbers_.find(&unit);
  const auto number = found == numbers_.end() ? -1 : found->second;
  auto text = std::string(event) + " " +
              (number < 0 ? "(unknown)" : units_[static_cast<size_t>(number)].name);
  if (events_.empty() || events_.back() != text) events_.push_back(std::move(text));
  if (events_.size() > kEventsKept) events_.pop_front();
  return number;
}

void ResidencyOracle::differ(const std::string& what) {
  if (difference_) return;
  std::ostringstream text;
  text << what << "\nafter";
  for (const auto& event : events_) text << "\n  " << event;
  difference_ = text.str();
}

void ResidencyOracle::check_bytes() {
  const auto held = resident_bytes(counters(mesh_)) - resident_bytes(start_);
  int64_t known = 0;
  int unknown = -1;
  const auto resident = model_.resident();
  for (const int unit : resident) {
    const auto bytes = bytes_[static_cast<size_t>(unit)];
    if (bytes < 0) {
      unknown = unit;
    } else {
      known += bytes;
    }
  }
  if (unknown >= 0 && held >= known) {
    bytes_[static_cast<size_t>(unknown)] = held - known;
    return;
  }
  if (held == known) return;
  std::ostringstream text;
  text << "unsharded bytes are " << held << ", but " << known << " by the rules:";
  for (const int unit : resident) {
    text << " " << units_[static_cast<size_t>(unit)].name << " ("
         << bytes_[static_cast<size_t>(unit)] << ")";
  }
  text << " are resident; the others are";
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    if (resident.count(static_cast<int>(unit)) == 0 && bytes_[unit] > 0)
      text << " " << units_[unit].name << " (" << bytes_[unit] << ")";
  }
  differ(text.str());
}

Counters ResidencyOracle::since_start() const {
  const auto now = counters(mesh_);
  return {.all_gathers = now.all_gathers - start_.all_gathers,
          .reduce_scatters = now.reduce_scatters - start_.reduce_scatters,
          .unused_prefetches = now.unused_prefetches - start_.unused_prefetches,
          .late_reduce_scatters = now.late_reduce_scatters - start_.late_reduce_scatters};
}

void ResidencyOracle::check_counts() {
  const auto events = since_start();
  const auto needed = model_.needed_gathers();
  const auto used = events.all_gathers - events.unused_prefetches;
  if (used < needed.least || (on_the_way().empty() && used > needed.most))
    differ(describe("all-gathers that were used", used, needed));
  const auto reductions = events.reduce_scatters - events.late_reduce_scatters;
  if (!model_.reductions().admits(reductions))
    differ(describe("reductions", reductions, model_.reductions()));
  for (size_t unit = 0; unit < units_.size(); ++unit) check_calls(unit, events);
}

// What was in vain, on its way, or late is of units that are not told here.
void ResidencyOracle::check_calls(size_t unit, const Counters& events) {
  const auto& [observed, name, spec, calls, keeps_pieces] = units_[unit];
  if (const auto* gathers = calls.gathers()) {
    auto count = model_.needed_gathers(static_cast<int>(unit));
    if (keeps_pieces) count.least = 0;
    count.most += events.unused_prefetches + static_cast<int64_t>(on_the_way().size());
    if (!count.admits(*gathers))
      differ(describe("calls of the custom all-gather of " + name, *gathers, count));
  }
  if (const auto* reductions = calls.reductions()) {
    auto count = model_.reductions(static_cast<int>(unit));
    count.most += events.late_reduce_scatters;
    if (!count.admits(*reductions))
      differ(describe("calls of the custom reduce-scatter of " + name, *reductions, count));
  }
}

int64_t ResidencyOracle::unused_prefetches() const { return counters(mesh_).unused_prefetches; }

std::set<int> ResidencyOracle::on_the_way() const {
  std::set<int> units;
  for (const auto& [unit, number] : numbers_) {
    if (unit->group() != nullptr && unit->group()->unsharded().state().is_gathering())
      units.insert(number);
  }
  return units;
}

std::vector<UnitTurn> ResidencyOracle::take_turns() { return std::exchange(turns_, {}); }

void ResidencyOracle::begin_turn(int unit, internal::Pass pass) {
  const bool backward = internal::in_backward(pass);
  auto what = std::string(backward ? "backward" : name_of(pass)) + " " +
              units_[static_cast<size_t>(unit)].name;
  if (!turns_.empty() && turns_.back().what == what) return;
  turns_.push_back({.what = std::move(what),
                    .unit = unit,
                    .in_backward = backward,
                    .resident_before = model_.resident(),
                    .on_the_way = on_the_way()});
}

// --- Events

void ResidencyOracle::touched(const internal::Unit& unit, internal::Pass pass) {
  const auto number = note(name_of(pass), unit);
  if (number < 0) return;
  begin_turn(number, pass);
  model_.touched(number, touch_of(pass));
  check_bytes();
}

void ResidencyOracle::gradient_arrived(const internal::Unit& unit) {
  const auto number = note("gradient of", unit);
  if (number < 0) return;
  model_.gradient_arrived(number);
  // Its gradients are nowhere: the reduction has taken them.
  if (!turns_.empty() && turns_.back().unit == number && unit.policy.synchronize_gradients &&
      unit.group()->gradients().empty()) {
    turns_.back().on_the_way_after_gradients = on_the_way();
  }
}

void ResidencyOracle::unshard_issued(const internal::Unit& unit) {
  if (const auto number = note("unshard_async of", unit); number >= 0)
    model_.unshard_issued(number);
}

void ResidencyOracle::unsharded_explicitly(const internal::Unit& unit) {
  const auto number = note("unshard of", unit);
  if (number < 0) return;
  model_.unsharded_explicitly(number);
  check_bytes();
}

void ResidencyOracle::resharded_explicitly(const internal::Unit& unit) {
  const auto number = note("reshard of", unit);
  if (number < 0) return;
  model_.resharded_explicitly(number);
  check_bytes();
}

void ResidencyOracle::entry_written(const internal::Unit& unit) {
  if (const auto number = note("write to an entry of", unit); number >= 0)
    model_.entry_written(number);
}

void ResidencyOracle::member_written(const internal::Unit& unit) {
  if (const auto number = note("write to a member of", unit); number >= 0)
    model_.member_written(number);
}

void ResidencyOracle::backward_ended() {
  events_.push_back("end of backward");
  model_.backward_ended();
  check_bytes();
}

void ResidencyOracle::backward_aborted() {
  events_.push_back("backward aborted");
  model_.backward_aborted();
  check_bytes();
}

}  // namespace fsdp::testing
