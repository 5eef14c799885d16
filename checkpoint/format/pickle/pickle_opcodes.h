// The opcodes of the machine that a pickle is a program of, and what each does to its
// stack. They build Pickled values and run nothing.
#pragma once

#include "checkpoint/format/pickle/pickle_input.h"
#include "checkpoint/format/pickle/pickle_stack.h"

namespace fsdp::internal::checkpoint {

// Takes opcodes from the input up to the one that ends a pickle; its result is at the top
// of the stack then. Throws std::runtime_error.
void run_opcodes(PickleInput& input, PickleStack& stack);

}  // namespace fsdp::internal::checkpoint
