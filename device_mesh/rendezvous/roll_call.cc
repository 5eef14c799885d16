#include "device_mesh/rendezvous/roll_call.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <array>
#include <cstdio>
#include <thread>
#include <utility>

namespace fsdp::internal {
namespace {

using Clock = std::chrono::steady_clock;

// Verdicts: the first line is the kind, the rest the text.
const std::string kAllThere = "all";
const std::string kMistake = "mistake\n";
const std::string kFailure = "failure\n";

const std::string kPresent = "present";  // topics: one for each time that all meet
const std::string kReady = "ready";
const std::string kConnected = "connected";
const std::string kLeaving = "leaving";

std::string member_key(const std::string& topic, int64_t index) {
  return topic + "/" + std::to_string(index);
}
std::string verdict_key(const std::string& topic) { return topic + "/verdict"; }

std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

std::string seconds_since(Clock::time_point begin) {
  const auto seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), seconds < 10 ? "%.1f s" : "%.0f s", seconds);
  return text.data();
}

}  // namespace

RollCall::RollCall(RollCallOptions options) : options_(std::move(options)) {}

std::vector<Presence> RollCall::gather(const Presence& own) {
  meet_at(kPresent, to_text(own));
  std::vector<std::string> keys;
  for (size_t i = 0; i < options_.ranks.size(); ++i)
    keys.push_back(member_key(kPresent, static_cast<int64_t>(i)));
  std::vector<Presence> members;
  if (options_.store->hasExtendedApi()) {
    for (const auto& word : options_.store->multiGet(keys))
      members.push_back(parse_presence({word.begin(), word.end()}));
  } else {
    for (const auto& key : keys) members.push_back(parse_presence(text_of(key)));
  }
  return members;
}

void RollCall::meet(Stage stage) { meet_at(stage == Stage::kReady ? kReady : kConnected, "here"); }

void RollCall::leave() {
  constexpr auto kAtMost = std::chrono::seconds(30);
  if (!options_.serves_store) {
    try {
      options_.store->set(member_key(kLeaving, options_.index), bytes_of("gone"));
    } catch (const c10::Error&) {
      // Whoever serves it was killed, and the group is there all the same.
    }
    return;
  }
  std::vector<std::string> others;
  for (size_t i = 0; i < options_.ranks.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    if (index != options_.index) others.push_back(member_key(kLeaving, index));
  }
  if (!others.empty()) wait_until(others, std::min(Clock::now() + kAtMost, options_.deadline));
}

void RollCall::agree(const std::string& what, const std::string& value) {
  auto& store = *options_.store;
  const auto key = "agreed/" + what;
  if (store.add(key + "/first", 1) == 1)
    store.set(key, bytes_of(value + "\n" + std::to_string(rank())));
  TORCH_CHECK_WITH(DistStoreError, wait_until(key, options_.deadline),
                   "the first rank to come for ", options_.group, " ended before it told its ",
                   what);
  const auto first = text_of(key);
  const auto end = first.find('\n');
  TORCH_CHECK_VALUE(first.compare(0, end, value) == 0, what, "=", value, ", where rank ",
                    first.substr(end + 1), " came with ", what, "=", first.substr(0, end),
                    ": every rank needs the same");
}

// The others may be anywhere.
void RollCall::refuse(const std::string& reason, bool mistake) {
  const auto verdict = c10::str(mistake ? kMistake : kFailure, "rank ", rank(), ": ", reason);
  for (const auto& topic : {kPresent, kReady, kConnected}) conclude(topic, verdict);
  leave_last();
  fail(verdict);
}

void RollCall::fail(const std::string& verdict) const {
  const auto text =
      c10::str(options_.group, " of ", ranks_text(options_.ranks), " can not be made (",
               "told on rank ", rank(), "): ", verdict.substr(verdict.find('\n') + 1));
  TORCH_CHECK_VALUE(verdict.compare(0, kMistake.size(), kMistake) != 0, text);
  C10_THROW_ERROR(DistStoreError, text);
}

bool RollCall::gathered() const { return options_.store->check({verdict_key(kPresent)}); }

std::optional<Presence> RollCall::claimed_by(std::chrono::milliseconds patience) const {
  const auto key = member_key(kPresent, options_.index);
  if (!wait_until(key, Clock::now() + patience)) return std::nullopt;
  return parse_presence(text_of(key));
}

void RollCall::meet_at(const std::string& topic, const std::string& word) {
  auto& store = *options_.store;
  store.set(member_key(topic, options_.index), bytes_of(word));
  const auto count = store.add(topic + "/count", 1);
  if (count == static_cast<int64_t>(options_.ranks.size())) conclude(topic, kAllThere);
  await_verdict(topic);
  const auto verdict = text_of(verdict_key(topic));
  if (verdict == kAllThere) return;
  leave_last();
  fail(verdict);
}

// The first verdict stands.
void RollCall::conclude(const std::string& topic, const std::string& verdict) {
  if (options_.store->add(topic + "/settled", 1) == 1)
    options_.store->set(verdict_key(topic), bytes_of(verdict));
}

void RollCall::await_verdict(const std::string& topic) {
  constexpr auto kUnusual = std::chrono::seconds(30);
  if (await_members(topic, std::min(Clock::now() + kUnusual, options_.deadline))) return;
  if (Clock::now() < options_.deadline) {
    std::fprintf(stderr, "fsdp: rank %lld still waits: %s\n", static_cast<long long>(rank()),
                 describe_missing(topic, "after " + seconds_since(began_)).c_str());
    std::fflush(stderr);
    if (await_members(topic, options_.deadline)) return;
  }
  conclude_for_good(
      topic,
      kFailure + describe_missing(topic, "within " + seconds_since(began_)) + options_.advice,
      std::chrono::seconds(1));
}

// As wait_until() for the verdict; gives it itself where one of the ranks is gone.
bool RollCall::await_members(const std::string& topic, Clock::time_point until) {
  constexpr auto kLook = std::chrono::milliseconds(200);
  const auto key = verdict_key(topic);
  while (options_.why_gone && Clock::now() < until) {
    if (wait_until(key, std::min(Clock::now() + kLook, until))) return true;
    const auto why = options_.why_gone();
    if (!why.empty()) conclude_for_good(topic, kFailure + why, kLook);
  }
  return wait_until(key, until);
}

// With patience for another rank that is settling it; one that is gone may have been
// about to, or may have come without being counted.
void RollCall::conclude_for_good(const std::string& topic, const std::string& verdict,
                                 std::chrono::milliseconds patience) {
  conclude(topic, verdict);
  if (wait_until(verdict_key(topic), Clock::now() + patience)) return;
  options_.store->set(verdict_key(topic), bytes_of(verdict));
}

bool RollCall::wait_until(const std::string& key, Clock::time_point until) const {
  return wait_until(std::vector{key}, until);
}

// False when the time is up. Throws where the store is gone.
bool RollCall::wait_until(const std::vector<std::string>& keys, Clock::time_point until) const {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now());
  try {
    options_.store->wait(keys, std::max(left, std::chrono::milliseconds(1)));
    return true;
  } catch (const c10::DistNetworkError&) {
    throw;
  } catch (const std::exception&) {
    return false;  // The kinds of stores throw different errors.
  }
}

// The process that serves the store gives the others a second to learn what it knows.
void RollCall::leave_last() {
  auto& store = *options_.store;
  store.add("heard", 1);
  if (!options_.serves_store) return;
  const auto until = Clock::now() + std::chrono::seconds(1);
  while (store.add("heard", 0) < store.add(kPresent + "/count", 0) && Clock::now() < until)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
}

RollCall::Missing RollCall::missing(const std::string& topic) const {
  Missing found;
  for (size_t i = 0; i < options_.ranks.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    if (!options_.store->check({member_key(topic, index)}))
      found.ranks.push_back(options_.ranks[i]);
    const auto key = member_key(kPresent, index);
    if (options_.store->check({key}))
      found.present.emplace(options_.ranks[i], parse_presence(text_of(key)));
  }
  return found;
}

std::string RollCall::describe_missing(const std::string& topic, const std::string& since) const {
  const auto found = missing(topic);
  if (found.ranks.empty()) return c10::str(options_.group, ": not all ranks came ", since);
  const auto* step = topic == kConnected ? "connected to the others "
                     : topic == kReady   ? "got ready to connect "
                                         : "come ";
  return c10::str(ranks_text(found.ranks), found.ranks.size() == 1 ? " has not " : " have not ",
                  step, since, "; there are: ", describe(found.present));
}

std::string RollCall::text_of(const std::string& key) const {
  const auto bytes = options_.store->get(key);
  return {bytes.begin(), bytes.end()};
}

}  // namespace fsdp::internal
