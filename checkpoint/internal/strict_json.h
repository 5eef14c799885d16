// JSON that is refused where it repeats a key: which of the two would count is nobody's
// knowledge.
#pragma once

#include <absl/status/statusor.h>
#include <nlohmann/json.hpp>

#include <string>
#include <string_view>

namespace fsdp::internal::checkpoint {

using Json = nlohmann::json;

// `what` names the text in the error.
absl::StatusOr<Json> parse_json(std::string_view text, const std::string& what);

}  // namespace fsdp::internal::checkpoint
