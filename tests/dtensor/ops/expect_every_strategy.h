// Every strategy of an operator against the operator itself, in one process.
#pragma once

#include <ATen/core/stack.h>

#include <set>
#include <string>

namespace fsdp::testing {

// For one to four parts and every strategy that the table has for operator `name` ("mm.")
// with these plain arguments (defaults for those left out): splits the tensors as the
// strategy says, runs the operator on each part, puts together what comes out, and
// expects the operator's own results. Also expects their global geometry to be as the
// table has it.
void expect_every_strategy(const std::string& name, const torch::jit::Stack& arguments);

// The operators that were checked so far.
const std::set<std::string>& checked_operators();

}  // namespace fsdp::testing
