// Training steps of a tiny sharded model, written by hand with a stream for gathers and
// one for reductions: every wait that such a step needs, any of which can be left out.
// What the order checker and the schedules are tried on.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

namespace fsdp::testing::simulated {

// Main is the stream that computes, G gathers, R reduces.
enum class Omitted {
  kNothing,
  kGatherAfterWrites,         // W1: G waits for main's writes to shards
  kUseAfterGather,            // W2: main waits for the gather
  kGatherAfterCopyOut,        // W3: G waits for the copy-out before it allocates
  kReductionAfterPacking,     // W5: R waits for the packed rows
  kRowsFreedAfterReduction,   // W6: main waits for the reduction before rows go
  kOptimizerAfterReductions,  // W7: main waits for the reductions at the end
  kAllocationAfterPacking,    // W8: R allocates its outputs after W5
  kOtherStreamAfterCopyOut,   // W9: another stream that computes waits for the copy-out
  kFreedAfterOtherStream,     // W10: main waits for that stream before the copy goes
};

// The shards after two steps. Opens three streams: 1 gathers, 2 reduces, 3 is the other
// one that computes.
at::Tensor hand_written_steps(Omitted omitted, c10::Device device);

}  // namespace fsdp::testing::simulated
