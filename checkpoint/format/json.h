// JSON as the files of a checkpoint have it, parsed strictly. (Values of LibTorch as
// JSON: ivalue_json.h.)
#pragma once

#include <absl/status/statusor.h>
#include <nlohmann/json.hpp>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp::internal::checkpoint {

using Json = nlohmann::json;

// `what` names the text in the error. Refuses JSON that repeats a key: which of the two
// would count is nobody's knowledge.
absl::StatusOr<Json> parse_json(std::string_view text, const std::string& what);

// A list of numbers without fractions; throws std::runtime_error for what is no list and
// for a number in it that is a fraction, a text, true or beyond 64 bits, which nlohmann
// would convert.
std::vector<int64_t> integers_of(const Json& json);

}  // namespace fsdp::internal::checkpoint
