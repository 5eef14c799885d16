// The names in a checkpoint: of the tensors of an optimizer's state, and what
// SaveOptions::name_in_file or ConvertOptions::name_in_file makes of names.
#pragma once

#include "checkpoint/format/json.h"
#include "checkpoint/plan/state_items.h"

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::internal::checkpoint {

// What the tensors of an optimizer's state are called in a checkpoint:
// "state.<parameter>.<field>", and "state.<parameter>.<field>.<number>" in a list.
inline constexpr const char* kStatePrefix = "state.";

struct StateName {
  std::string parameter, field;
  int64_t index = -1;  // in a list
};
// `lists`: an object with the names of lists as keys.
StateName state_name_from(const std::string& text, const Json& lists);
std::string to_string(const StateName& name);

// "a.b.exp_avg" -> {"a.b", "exp_avg"}
std::pair<std::string, std::string> split_last(const std::string& text);
// Whether the text consists of digits.
bool is_index(const std::string& text);

// Renames tensors and ties of models and of State::tensors, and in the state of
// optimizers the parameters; null: nothing. Two names of one tensor may become one.
// Throws ValueError, naming `option`, both names and what they become, where two tensors
// of an item get one name, and for a name that is empty or that a checkpoint cannot have.
void rename_in_file(std::vector<SaveItem>& items,
                    const std::function<std::string(const std::string&)>& name_in_file,
                    const std::string& option);

}  // namespace fsdp::internal::checkpoint
