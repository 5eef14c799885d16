#include "programs/trainer/report/page/page.h"

#include "programs/trainer/report/page/page_template.h"

#include <nlohmann/json.hpp>

#include <cmath>
#include <string_view>

namespace programs::run_report {
namespace {

using OrderedJson = nlohmann::ordered_json;

constexpr std::string_view kPlaceOfData = "RUN_DATA";

// In milliseconds, to tens of nanoseconds: all that traces have, in few digits.
double milliseconds(double seconds) { return std::round(seconds * 1e8) / 1e5; }

OrderedJson json_of(const Span& span, double shift) {
  return {span.of, milliseconds(shift + span.begin), milliseconds(shift + span.end)};
}

OrderedJson json_of(const std::vector<Span>& spans, double shift) {
  auto all = OrderedJson::array();
  for (const auto& span : spans) all.push_back(json_of(span, shift));
  return all;
}

OrderedJson json_of(const std::vector<Gather>& gathers, double shift) {
  auto all = OrderedJson::array();
  for (const auto& gather : gathers) {
    auto entry = json_of(static_cast<const Span&>(gather), shift);
    entry.push_back(gather.is_prefetch);
    entry.push_back(gather.is_used);
    entry.push_back(gather.bytes);
    entry.push_back(milliseconds(gather.waited));
    all.push_back(std::move(entry));
  }
  return all;
}

// The earliest of all ranks' steps begins at 0.
double first_clock(const std::vector<RankTimeline>& timelines) {
  std::optional<double> first;
  for (const auto& timeline : timelines) {
    if (timeline.step && (!first || timeline.step->clock < *first)) first = timeline.step->clock;
  }
  return first.value_or(0);
}

OrderedJson json_of(const RankTimeline& timeline, double first) {
  if (!timeline.step) return {{"rank", timeline.rank}, {"missing", timeline.missing}};
  const auto& step = *timeline.step;
  const double shift = step.clock - first;
  return {{"rank", timeline.rank},
          {"step", step.number},
          {"begin", milliseconds(shift)},
          {"end", milliseconds(shift + step.seconds)},
          {"phases", json_of(step.phases, shift)},
          {"gathers", json_of(step.gathers, shift)},
          {"reductions", json_of(step.reductions, shift)},
          {"waits", json_of(step.waits, shift)},
          {"redistributions", json_of(step.redistributions, shift)},
          {"unsharded", json_of(step.unsharded, shift)}};
}

OrderedJson json_of(const UnitRow& row) {
  return {{"name", row.unit.name},
          {"parameters", row.unit.parameters},
          {"bytes", row.unit.bytes},
          {"gathers", row.gathers},
          {"prefetched", row.prefetched},
          {"unused", row.unused},
          {"gathered_bytes", row.gathered_bytes},
          {"exposed", milliseconds(row.exposed_seconds)},
          {"unsharded_share", row.unsharded_share}};
}

OrderedJson json_of(const StepPoint& point) {
  return {{"step", point.step},
          {"loss", point.loss},
          {"tokens_per_second", point.tokens_per_second},
          {"waiting", point.waiting},
          {"peak_bytes", point.peak_bytes}};
}

template <class Values, class... Shift>
OrderedJson array_of(const Values& values, Shift... shift) {
  auto all = OrderedJson::array();
  for (const auto& value : values) all.push_back(json_of(value, shift...));
  return all;
}

OrderedJson json_of(const Run& run) {
  OrderedJson json = {{"title", run.title},
                      {"facts", OrderedJson::array()},
                      {"steps", array_of(thinned(run.steps, kMostPoints))},
                      {"validations", OrderedJson::array()},
                      {"bound", run.bound ? OrderedJson(*run.bound) : nullptr},
                      {"about_bound", run.about_bound},
                      {"unsharded_bound", run.unsharded_bound},
                      {"profiled", run.profiled},
                      {"timelines", array_of(run.timelines, first_clock(run.timelines))},
                      {"units", array_of(run.units)},
                      {"advice", OrderedJson::array()},
                      {"about_advice", run.about_advice}};
  for (const auto& [name, value] : run.facts)
    json["facts"].push_back(OrderedJson::array({name, value}));
  for (const auto& [step, loss] : run.validations)
    json["validations"].push_back(OrderedJson::array({step, loss}));
  for (const auto& each : run.advice)
    json["advice"].push_back({{"title", each.title}, {"reason", each.reason}});
  return json;
}

// In a script element of a page: "</script>" and "<!--" in a name must not end it.
std::string for_script(const OrderedJson& json) {
  std::string text;
  for (const char each : json.dump(-1, ' ', false, OrderedJson::error_handler_t::replace)) {
    if (each == '<')
      text += "\\u003c";
    else
      text += each;
  }
  return text;
}

}  // namespace

std::string page_of(const Run& run) {
  const auto place = page_template.find(kPlaceOfData);
  std::string page(page_template.substr(0, place));
  page += for_script(json_of(run));
  page += page_template.substr(place + kPlaceOfData.size());
  return page;
}

}  // namespace programs::run_report
