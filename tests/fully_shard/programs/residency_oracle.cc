#include "tests/fully_shard/programs/residency_oracle.h"

#include "fully_shard/params/param_group.h"

#include <algorithm>
#include <sstream>
#include <utility>

namespace fsdp::testing {
namespace {

constexpr size_t kEventsKept = 60;

// Counters that may not be there yet.
template <class C>
std::optional<int64_t> unused_of(const C& counters) {
  if constexpr (requires { counters.unused_prefetches; }) return counters.unused_prefetches;
  return std::nullopt;
}

template <class C>
int64_t late_of(const C& counters) {
  if constexpr (requires { counters.late_reduce_scatters; }) return counters.late_reduce_scatters;
  return 0;
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
    : mesh_(mesh), start_(counters(mesh)), before_(internal::set_unit_observer(this)) {
  for (const auto& unit : units) {
    numbers_[unit.unit] = model_.add_unit(unit.spec);
    names_.push_back(unit.name);
    bytes_.push_back(-1);
  }
}

ResidencyOracle::~ResidencyOracle() { internal::set_unit_observer(before_); }

int ResidencyOracle::note(const char* event, const internal::Unit& unit) {
  const auto found = numbers_.find(&unit);
  const auto number = found == numbers_.end() ? -1 : found->second;
  auto text =
      std::string(event) + " " + (number < 0 ? "(unknown)" : names_[static_cast<size_t>(number)]);
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
  const auto held = counters(mesh_).unsharded_bytes - start_.unsharded_bytes;
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
    text << " " << names_[static_cast<size_t>(unit)] << " (" << bytes_[static_cast<size_t>(unit)]
         << ")";
  }
  text << " are resident; the others are";
  for (size_t unit = 0; unit < names_.size(); ++unit) {
    if (resident.count(static_cast<int>(unit)) == 0 && bytes_[unit] > 0)
      text << " " << names_[unit] << " (" << bytes_[unit] << ")";
  }
  differ(text.str());
}

void ResidencyOracle::check_counts() {
  const auto now = counters(mesh_);
  const auto describe = [](const char* what, int64_t value, const ResidencyModel::Count& count) {
    return std::string(what) + ": " + std::to_string(value) + ", by the rules " +
           std::to_string(count.least) + " to " + std::to_string(count.most);
  };
  const auto& needed = model_.needed_gathers();
  const auto issued = now.all_gathers - start_.all_gathers;
  const auto unused = unused_of(now);
  const auto used = issued - (unused ? *unused - *unused_of(start_) : 0);
  const bool in_flight = std::any_of(numbers_.begin(), numbers_.end(), [](const auto& item) {
    const auto* group = item.first->group;
    return group != nullptr && group->residency().is_gathering();
  });
  if (used < needed.least || (unused && !in_flight && used > needed.most))
    differ(describe("all-gathers that were used", used, needed));
  const auto reductions =
      now.reduce_scatters - start_.reduce_scatters - (late_of(now) - late_of(start_));
  if (!model_.reductions().admits(reductions))
    differ(describe("reductions", reductions, model_.reductions()));
}

int64_t ResidencyOracle::unused_prefetches() const {
  return unused_of(counters(mesh_)).value_or(0);
}

std::vector<std::string> ResidencyOracle::take_touches() { return std::exchange(touches_, {}); }

bool ResidencyOracle::has_one_successor_each(const std::vector<std::string>& touches) {
  std::map<std::pair<std::string, std::string>, std::string> successors;
  const auto kind = [](const std::string& touch) { return touch.substr(0, touch.find(' ')); };
  for (size_t i = 1; i <= touches.size(); ++i) {
    // Where the kind changes, what came before is not looked at.
    const bool has_previous = i > 1 && kind(touches[i - 2]) == kind(touches[i - 1]);
    const auto previous = has_previous ? touches[i - 2] : std::string();
    const bool ends = i == touches.size() || kind(touches[i]) != kind(touches[i - 1]);
    const auto next = ends ? "end" : touches[i];
    const auto [known, added] = successors.emplace(std::pair(previous, touches[i - 1]), next);
    if (!added && known->second != next) return false;
  }
  return true;
}

// --- Events

void ResidencyOracle::touched(const internal::Unit& unit, internal::Pass pass) {
  const auto number = note(name_of(pass), unit);
  if (number < 0) return;
  const bool backward = internal::in_backward(pass);
  auto touch = std::string(backward ? "backward" : name_of(pass)) + " " +
               names_[static_cast<size_t>(number)];
  if (touches_.empty() || touches_.back() != touch) touches_.push_back(std::move(touch));
  model_.touched(number, touch_of(pass));
  check_bytes();
}

void ResidencyOracle::gradient_arrived(const internal::Unit& unit) {
  if (const auto number = note("gradient of", unit); number >= 0) model_.gradient_arrived(number);
}

void ResidencyOracle::unshard_issued(const internal::Unit& unit) {
  if (const auto number = note("unshard_async of", unit); number >= 0)
    model_.unshard_issued(number);
}

void ResidencyOracle::unsharded_by_hand(const internal::Unit& unit) {
  const auto number = note("unshard of", unit);
  if (number < 0) return;
  model_.unsharded_by_hand(number);
  check_bytes();
}

void ResidencyOracle::emptied_by_hand(const internal::Unit& unit) {
  const auto number = note("reshard of", unit);
  if (number < 0) return;
  model_.emptied_by_hand(number);
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
