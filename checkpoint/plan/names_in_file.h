// The names under which a checkpoint has what SaveOptions::name_in_file or
// ConvertOptions::name_in_file renames.
#pragma once

#include "checkpoint/plan/save_plan.h"

#include <functional>
#include <string>
#include <vector>

namespace fsdp::internal::checkpoint {

// Renames tensors and ties of models and of State::tensors, and in the state of
// optimizers the parameters; null: nothing. Two names of one tensor may become one.
// Throws ValueError, naming `option`, both names and what they become, where two tensors
// of an item get one name, and for a name that is empty or that a checkpoint cannot have.
void rename_in_file(std::vector<SaveItem>& items,
                    const std::function<std::string(const std::string&)>& name_in_file,
                    const std::string& option);

}  // namespace fsdp::internal::checkpoint
