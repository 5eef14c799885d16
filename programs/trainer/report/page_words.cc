#include "programs/trainer/report/page_words.h"

#include "programs/words.h"

#include <c10/core/ScalarType.h>

#include <optional>

namespace programs {
namespace {

std::string in_words(Units units) {
  switch (units) {
    case Units::kBlocks:
      return "blocks";
    case Units::kLayers:
      return "layers";
    case Units::kRoot:
      return "the root alone";
  }
  return "";
}

std::string in_words(std::optional<c10::ScalarType> dtype) {
  return dtype ? c10::toString(*dtype) : "Float";
}

std::string batch_in_words(const TrainingOptions& options) {
  std::string text = std::to_string(options.batch) + " x " + counted(options.tokens, "token");
  if (options.accumulate > 1) text += ", " + std::to_string(options.accumulate) + " times";
  return text;
}

std::string ranks_in_words(const TrainingOptions& options, int64_t ranks, int64_t hosts) {
  auto text = std::to_string(ranks) + " on " + counted(hosts, "host");
  if (options.replicas > 1) text += ", " + counted(options.replicas, "replica");
  if (options.tp > 1) text += ", tensor parallelism of " + std::to_string(options.tp);
  return text;
}

std::string formula_in_words(const run_report::Sharding& sharding, bool root_is_alone) {
  if (sharding.where == run_report::Unsharded::kInPlace)
    return std::string(
               "Ranks show parameters where all of them have their shards, so unsharded units "
               "take no memory. The bound is the root's gradients") +
           (root_is_alone ? "." : ", and twice those of the largest unit.");
  const std::string part = sharding.has_replicas ? "two ranks' parts of" : "a rank's part of";
  if (root_is_alone)
    return "The bound is the root's parameters and gradients, and " + part + " these.";
  return "The bound is the root's parameters and gradients, twice those of the largest unit, and " +
         part +
         " its gradients. The first step may need a unit more, before the order of units is known.";
}

// One tensor parallel rank's of them.
std::string parameters_in_words(const std::vector<run_report::UnitFacts>& units, int64_t tp) {
  int64_t bytes = 0;
  for (const auto& unit : units) bytes += unit.bytes;
  return bytes_in_words(static_cast<double>(bytes)) + (tp > 1 ? " of a tensor parallel rank" : "");
}

}  // namespace

std::vector<std::pair<std::string, std::string>> settings_in_words(
    const TrainingOptions& options, const RanksAndHosts& where,
    const std::vector<run_report::UnitFacts>& units) {
  return {{"ranks", ranks_in_words(options, where.ranks, where.hosts)},
          {"all units, unsharded and padded", parameters_in_words(units, options.tp)},
          {"units", in_words(options.units)},
          {"computes in", in_words(options.sharding.mp_policy.param_dtype)},
          {"batch of a rank", batch_in_words(options)}};
}

bool keeps_units(const TrainingOptions& options) {
  const auto& reshard = options.sharding.reshard_after_forward;
  return reshard.has_value() && (!reshard->reshards() || reshard->world().has_value());
}

std::string about_bound(const TrainingOptions& options, const run_report::Sharding& sharding) {
  if (sharding.ranks == 1)
    return sharding.has_replicas
               ? "No bound is drawn: there is none for replicas that hold the whole model."
               : "A rank that shards with no other needs nothing beside its shards.";
  if (keeps_units(options) && sharding.where != run_report::Unsharded::kInPlace)
    return "No bound is drawn: units that --reshard_after_forward keeps come on top of it.";
  auto text = formula_in_words(sharding, options.units == Units::kRoot);
  if (options.accumulate > 1)
    text +=
        " Gradients of all units count, for those of a backward that was not the last one of "
        "its step (--accumulate) stay.";
  return text + " What is counted are unsharded parameters, rows on their way and full gradients.";
}

std::string about_advice(const run_report::RunFacts& facts) {
  if (facts.sharding_ranks * facts.replicas == 1)
    return "Of one rank there is nothing to say: it gathers nothing and waits for nobody.";
  if (facts.ranks.empty())
    return "Units were looked at. How long ranks wait and compute was not: that needs ten steps "
           "after the first.";
  return "Units, gathers ahead, waiting and the loads of ranks were looked at.";
}

}  // namespace programs
