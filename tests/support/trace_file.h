// A trace of fsdp::Profile (fully_shard/profile.h), and what its ranges add up to.
#pragma once

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <ostream>
#include <string>
#include <string_view>

namespace fsdp::testing {

// A path for a trace, which goes at the end.
class TraceFile {
 public:
  explicit TraceFile(const std::string& name)
      : path_(::testing::TempDir() + "fsdp_" + std::to_string(getpid()) + "_" + name) {}
  ~TraceFile() { std::filesystem::remove(path_); }
  TraceFile(const TraceFile&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// What a trace's ranges of one kind add up to.
struct RangeSum {
  int64_t count = 0, bytes = 0;
  bool operator==(const RangeSum&) const = default;
};
inline void PrintTo(const RangeSum& sum, std::ostream* out) {
  *out << sum.count << " of " << sum.bytes << " bytes together";
}

inline nlohmann::json events_in(const std::string& path) {
  std::ifstream file(path);
  return nlohmann::json::parse(file).at("traceEvents");
}

inline bool is_range(const nlohmann::json& event, const std::string& what) {
  return event.value("ph", "") == "X" &&
         std::string_view(event.at("name").get_ref<const std::string&>())
             .starts_with("fsdp::" + what + "(");
}

inline RangeSum sum_of(const nlohmann::json& events, const std::string& what) {
  RangeSum sum;
  for (const auto& event : events) {
    if (!is_range(event, what)) continue;
    ++sum.count;
    const auto& name = event.at("name").get_ref<const std::string&>();
    if (name.ends_with(" bytes")) sum.bytes += std::stoll(name.substr(name.rfind(')') + 1));
  }
  return sum;
}

}  // namespace fsdp::testing
