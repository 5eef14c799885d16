// What a random program has that no single field of it says.
#pragma once

#include "tests/fully_shard/random_programs/random_program.h"

namespace fsdp::testing {

// The longest chain of nested units.
int unit_depth(const Node& node);
// Of a sharded parameter: within one unit, or across several.
bool has_tie(const Program& program, bool across_units);
// A unit's own parameters do.
bool mixes_dtypes(const Node& node);
// Its units do.
bool mixes_precisions(const Program& program);
bool has_prefetch_lists(const Program& program);
bool accumulates_over_steps(const Program& program);
bool accumulates_without_sync(const Program& program);
// Runs its model, or a part of it, where no gradients are recorded.
bool computes_without_gradients(const Program& program);
// The forward gives an operator nothing but the parameter's registry entry, for which
// nothing is recorded.
bool reads_entry_alone(const ParamSpec& param);
// `kind`, of a parameter that was frozen from the start or not, between two steps of
// training.
bool freezes_later(const Program& program, ActionKind kind, bool frozen_before);

}  // namespace fsdp::testing
