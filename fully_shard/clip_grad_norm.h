// Clipping by the norm of all gradients, whatever meshes they are sharded over.
//
//   loss.backward();
//   fsdp::clip_grad_norm_(model->parameters(), 1.0);
//   optimizer.step();
#pragma once

#include "device_mesh/api.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace fsdp {

// Scales the gradients of `params` in place so that their joint p-norm is at most
// `max_norm`, and returns the norm before: a plain 0-dim tensor. Parameters without a
// gradient are skipped; one that is listed twice, as parameters() lists a tied one,
// counts and is scaled once. 16-bit gradients are summed in fp32.
//
// Without a DTensor among the gradients it is local, as LibTorch's. Otherwise one
// all-gather over the smallest mesh among those met that has all their ranks (along each
// of its dimensions, if it has several and not all ranks of the job): collective over it,
// and every rank of it gets the same norm. A shard counts once, and so does a
// gradient that is replicated. A gradient on a part of that mesh only (an expert group)
// counts once where every copy has the same norm. Plain gradients are taken for copies:
// where they differ, the rank with the largest counts.
//
// Every rank passes the same parameters in the same order, max_norm and norm_type; on the
// CPU that is compared: by number, shapes and placements, and, among the ranks of each
// mesh, by the model that they are of, so that two of one class are told apart. (Of
// DTensors that users distributed only shapes and placements are known.)
//
// Throws, on all ranks alike and with nothing scaled, ValueError for a max_norm that is
// negative or NaN, a norm_type that is not positive, ranks that do not clip the same,
// meshes of which none has all ranks, and copies whose norms differ (then call it once
// per group of ranks that has the parameters in common); NotImplementedError for Partial
// gradients; with error_if_nonfinite, which waits for the norm on the host, c10::Error
// for one that is NaN or infinite.
FSDP_API at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& params, double max_norm,
                                    double norm_type = 2.0, bool error_if_nonfinite = false);

}  // namespace fsdp
