// What operators compute with in the place of registry entries that they are given.
#pragma once

#include "on_demand/gate_arguments.h"

namespace fsdp::internal {

// Puts plain tensors in the place of registry entries, in operators that write no
// DTensor:
//
//   under grad mode, of entries that require grad: their members
//   of entries and views of them that are left and meet a plain tensor, or a DTensor on
//   another mesh (dtensor/dispatch/implicit_replication.h): the member (entry), or the value
//   gathered for this operator (view, and what else lies on that mesh)
//
// so a module computes with entries (ParameterList, named_parameters()["w"], a custom
// autograd::Function) what it would with members, in any mode, and what happens among
// entries alone (optimizers) stays sharded. True when there were any: the operator must
// then be dispatched anew, since its key set was that of the entries. What is gathered is
// collective; whether something is depends on the operator's arguments alone, not on the
// rank.
bool substitute_entries(GateArguments& arguments);

}  // namespace fsdp::internal
