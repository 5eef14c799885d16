// What the tensors of an optimizer's state are called in a checkpoint:
// "state.<parameter>.<field>", and "state.<parameter>.<field>.<number>" in a list.
#pragma once

#include "checkpoint/format/strict_json.h"

#include <cstdint>
#include <string>

namespace fsdp::internal::checkpoint {

inline constexpr const char* kStatePrefix = "state.";

struct StateName {
  std::string parameter, field;
  int64_t index = -1;  // in a list
};
// `lists`: an object with the names of lists as keys.
StateName state_name_from(const std::string& text, const Json& lists);
std::string to_string(const StateName& name);

}  // namespace fsdp::internal::checkpoint
