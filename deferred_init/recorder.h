// What the gate does with an operator of a deferred initialisation: it runs on the meta
// device, so that shapes and errors are those of the real one, and goes onto the tape.
// Random numbers are drawn all the same, into scratch memory of the operator's size, so
// that every draw, and every later one of the program, is the one of a model that was
// built at once.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>

namespace fsdp::internal {

// From now on, operators that make tensors out of nothing are recorded in threads that
// include the gate's key, and what changes a deferred tensor is recorded everywhere.
// Idempotent, thread-safe.
void enable_recording();

// Whether the operator belongs onto a tape; then it is done, and its results are on
// `stack`. Throws ValueError, with the operator's name, for one whose result depends on
// values (item(), nonzero()), that has no kernel for the meta device, that makes a tensor
// on another device than the CPU, or that takes tensors of tapes of two threads.
bool record_if_deferred(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                        torch::jit::Stack* stack);

}  // namespace fsdp::internal
