// Gives every rank one rank's parameters and buffers: a checkpoint that only one rank
// read, weights that were drawn with different seeds.
//
//   Transformer model(config);
//   if (mesh.rank() == 0) torch::load(model, path);
//   fsdp::broadcast_states(*model, mesh);          // before fully_shard
//   fsdp::fully_shard(model, mesh);
#pragma once

#include "device_mesh/api.h"
#include "device_mesh/device_mesh.h"
#include "device_mesh/module_ref.h"

#include <cstdint>

namespace torch::nn {
class Module;
}

namespace fsdp {

// Every parameter and buffer at and below `module` gets, in place and bit by bit, the
// values that it has on rank mesh.ranks()[src]: of any dtype, frozen or not, contiguous
// or not. A tensor that is registered several times is sent once. Handles, requires_grad
// and gradients stay. Tensors that a living graph saved count as written.
//
// Collective over the whole mesh, whatever its dimensions. Sends each byte once along
// every dimension, 250 MiB at a time, which is what it takes of memory; a tensor that is
// not contiguous is copied besides.
//
// Throws ValueError, on all ranks and with nothing changed, for a `src` that is no rank
// of the mesh; where the ranks' parameters and buffers differ in names, order, shapes or
// dtypes, naming the first that does; and for one that is sharded already (a rank then
// has only its part of the values), on the meta or another device than the mesh, not
// strided, quantized, made in inference mode, or expanded (some of its elements share
// memory).
FSDP_API void broadcast_states(ModuleRef module, const DeviceMesh& mesh = default_mesh(),
                               int64_t src = 0);

}  // namespace fsdp
