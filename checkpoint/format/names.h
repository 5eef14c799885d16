// Names that two sides do not share, in messages.
#pragma once

#include <string>
#include <vector>

namespace fsdp::internal::checkpoint {

// The first 20, and how many more.
std::string list_of(const std::vector<std::string>& names);

// Throws ValueError that lists what there is of both. `place`: "the file".
void check_no_names(const std::vector<std::string>& missing, const std::string& place,
                    const std::vector<std::string>& unexpected, const std::string& advice);

}  // namespace fsdp::internal::checkpoint
