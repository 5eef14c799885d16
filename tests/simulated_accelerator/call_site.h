// A place in the library, as the frames of the stack that are its own.
//
// Only functions in namespace fsdp count, without those of fsdp::testing. Their names
// come from the symbol table of the program or library, which needs no debug information,
// but must not be stripped.
#pragma once

#include <string>
#include <vector>

namespace fsdp::testing::simulated {

using CallSite = std::vector<const void*>;  // return addresses, innermost first

// That of the calling thread: at most three frames.
CallSite call_site_of_library();

// "fsdp::inner < fsdp::outer"
std::string to_string(const CallSite& place);

}  // namespace fsdp::testing::simulated
