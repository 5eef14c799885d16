#include "programs/trainer/report/page/trace.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <map>
#include <optional>
#include <stdexcept>
#include <string_view>

namespace programs::run_report {
namespace {

using Json = nlohmann::json;

// Elements of "traceEvents" are that deep.
constexpr int kDepthOfEvents = 2;

struct RangeName {
  RangeKind kind;
  std::string of;
  int64_t bytes;
};

std::optional<RangeKind> kind_of(std::string_view what) {
  static const std::map<std::string_view, RangeKind> kinds = {
      {"fsdp::all_gather", RangeKind::kGather},
      {"fsdp::outer_all_gather", RangeKind::kOuterGather},
      {"fsdp::prefetch", RangeKind::kPrefetch},
      {"fsdp::all_gather_copy_out", RangeKind::kCopyOut},
      {"fsdp::reduce_scatter", RangeKind::kReduction},
      {"fsdp::all_reduce", RangeKind::kReduction},
      {"fsdp::outer_reduce_scatter", RangeKind::kReduction},
      {"fsdp::wait", RangeKind::kWait},
      {"fsdp::reshard", RangeKind::kReshard},
      {"fsdp::redistribute", RangeKind::kRedistribution},
      {"train::step", RangeKind::kStep},
      {"train::phase", RangeKind::kPhase}};
  const auto found = kinds.find(what);
  return found == kinds.end() ? std::nullopt : std::optional(found->second);
}

// Of "fsdp::all_gather(block0) 4096 bytes"; a unit's name may have brackets, too.
std::optional<RangeName> name_in(const std::string& name) {
  const auto open = name.find('('), close = name.rfind(')');
  if (open == std::string::npos || close == std::string::npos || close < open) return std::nullopt;
  const auto kind = kind_of(std::string_view(name).substr(0, open));
  if (!kind) return std::nullopt;
  return RangeName{*kind, name.substr(open + 1, close - open - 1),
                   std::atoll(name.c_str() + close + 1)};
}

std::optional<Range> range_in(const Json& event) {
  if (!event.is_object() || event.value("ph", "") != "X") return std::nullopt;
  const auto name = name_in(event.value("name", ""));
  if (!name) return std::nullopt;
  const double begin = event.at("ts").get<double>() / 1e6;
  return Range{name->kind, name->of, name->bytes, begin,
               begin + event.at("dur").get<double>() / 1e6};
}

}  // namespace

Trace trace_in(std::istream& json) {
  Trace trace;
  // Events are not kept: there are thousands of operators for each range.
  const auto keep = [&](int depth, Json::parse_event_t event, Json& parsed) {
    if (event == Json::parse_event_t::object_start) return depth <= kDepthOfEvents;
    if (event != Json::parse_event_t::object_end || depth != kDepthOfEvents) return true;
    if (auto range = range_in(parsed)) trace.ranges.push_back(*std::move(range));
    return false;
  };
  try {
    const auto all = Json::parse(json, keep);
    if (!all.is_object() || !all.contains("traceEvents"))
      throw std::invalid_argument("has no traceEvents");
    trace.base_nanoseconds = all.value("baseTimeNanoseconds", int64_t{0});
  } catch (const Json::exception& error) {
    throw std::invalid_argument(std::string("is no trace: ") + error.what());
  }
  std::stable_sort(trace.ranges.begin(), trace.ranges.end(), [](const Range& a, const Range& b) {
    return a.begin < b.begin || (a.begin == b.begin && a.end > b.end);
  });
  return trace;
}

Trace read_trace(const std::string& path) {
  std::ifstream file(path);
  if (!file.is_open()) throw std::invalid_argument(path + " is not there");
  try {
    return trace_in(file);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(path + " " + error.what());
  }
}

}  // namespace programs::run_report
