// Whether ranks that name parameters in one call mean the same ones: of two models of one
// class all shapes are equal, so sizes tell nothing. A parameter is known by its unit's
// number on the process group and its place there, a tensor-parallel one by its path and
// the number of its model, which are alike on all ranks.
//
// Ranks are compared as far as their parameters lie on the same mesh: stages of a
// pipeline and experts have models of their own. DTensors that are neither are not known.
#pragma once

#include "device_mesh/on_mesh/claims.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace fsdp::internal {

// A topic for each mesh on which some of the parameters lie. Not for devices: making a
// unit is not announced there, so replicas may number them differently. Local.
void claim_parameters(Claims& claims, const std::vector<at::Tensor>& parameters);

}  // namespace fsdp::internal
