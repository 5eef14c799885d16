// Training and evaluation that use streams as programs without sharding may. They use
// record_stream() nowhere, and join their streams no earlier than they must: what the
// library does wrong with memory shows only between streams that run apart.
#pragma once

#include "tests/training_programs/program_rank.h"

#include <string>
#include <vector>

namespace fsdp::testing {

// Whether autograd hands gradients from one stream to another.
enum class Gradients { kStayOnTheirStream, kChangeStreams };

struct NamedProgram {
  std::string name;
  TrainingProgram program;
  Gradients gradients = Gradients::kStayOnTheirStream;
};

// One stream.
void train_on_one_stream(ProgramRank& rank);
// A unit is used on two streams, joined at once.
void train_with_a_second_branch(ProgramRank& rank);
// The unit's second use, or its first, is on another stream that joins at the end.
void train_with_the_second_use_on_the_side(ProgramRank& rank);
void train_with_the_first_use_on_the_side(ProgramRank& rank);
void evaluate_with_the_second_use_on_the_side(ProgramRank& rank);
void evaluate_with_the_first_use_on_the_side(ProgramRank& rank);
// Parameters of one unit are used, and get gradients, on two streams.
void train_one_unit_on_two_streams(ProgramRank& rank);
// Only the second stream uses a unit, while the first goes on and allocates.
void train_a_unit_on_the_side(ProgramRank& rank);
void evaluate_a_unit_on_the_side(ProgramRank& rank);
// Gathered by hand on one stream, first used on another, while the first allocates.
void gather_here_and_use_on_the_side(ProgramRank& rank);
// Used on the second stream, emptied while that still reads, and then the first
// allocates.
void reshard_by_hand_while_the_side_reads(ProgramRank& rank);
// Training, and after each step an evaluation on a second stream.
void evaluate_on_the_side(ProgramRank& rank);
// The second stream writes parameters, the first goes on with another unit, and the
// second uses what it wrote.
void write_on_the_side(ProgramRank& rank);
// Gradients from the second stream wait for the next backward, which does not use their
// parameters, while the second stream allocates.
void accumulate_on_the_side(ProgramRank& rank);
// All of a step on the second stream, with a forward that runs again in backward: no
// gradient arrives in the backward's own graph task.
void train_recomputed_on_the_side(ProgramRank& rank);
// A thread of the caller's runs backward.
void train_with_backward_on_a_thread(ProgramRank& rank);

// All of them.
std::vector<NamedProgram> stream_programs();

// HFSDP, on a mesh that it makes: the second stream writes pieces of inner shards that
// the first one gathers ahead of their use, while the first allocates.
void write_pieces_on_the_side(ProgramRank& rank);

}  // namespace fsdp::testing
