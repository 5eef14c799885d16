// Files that a run writes at its end, tried at its start.
#pragma once

#include <string>

namespace examples {

// Throws ValueError, naming the flag and the path, unless a file can be written there.
// What is there stays; where nothing is, nothing is left. Empty: no file. Local.
void check_output_file(const char* flag, const std::string& path);

}  // namespace examples
