#include "checkpoint/internal/strict_json.h"

#include <exception>
#include <optional>
#include <set>
#include <vector>

namespace fsdp::internal::checkpoint {
namespace {

// Sees every key as it is parsed.
class KeyWatch {
 public:
  bool operator()(int /*depth*/, Json::parse_event_t event, Json& parsed) {
    using Event = Json::parse_event_t;
    if (event == Event::object_start) open_.emplace_back();
    if (event == Event::object_end) open_.pop_back();
    if (event == Event::key && !open_.back().insert(parsed.get<std::string>()).second) {
      repeated_ = parsed.get<std::string>();
    }
    return true;
  }
  const std::string* repeated() const { return repeated_ ? &*repeated_ : nullptr; }

 private:
  std::vector<std::set<std::string>> open_;
  std::optional<std::string> repeated_;
};

}  // namespace

absl::StatusOr<Json> parse_json(std::string_view text, const std::string& what) {
  KeyWatch watch;
  try {
    Json json = Json::parse(text, [&](int depth, Json::parse_event_t event, Json& parsed) {
      return watch(depth, event, parsed);
    });
    if (const auto* key = watch.repeated()) {
      return absl::DataLossError(what + ": key '" + *key + "' stands there twice");
    }
    return json;
  } catch (const std::exception& error) {
    return absl::DataLossError(what + ": not JSON: " + error.what());
  }
}

}  // namespace fsdp::internal::checkpoint
