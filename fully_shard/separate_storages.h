// A model whose loader gave it slices of one buffer, for the loop that makes units of it
// bottom-up.
//
//   fsdp::separate_storages(model);
//   for (auto& block : model->blocks) fsdp::fully_shard(block, mesh);
//   fsdp::fully_shard(model, mesh);
#pragma once

#include "device_mesh/api.h"
#include "device_mesh/module_ref.h"

namespace fsdp {

// Gives every parameter at and below `module` that has its storage in common with other
// parameters or buffers memory of its own, in place: handles stay, and so do values.
// Buffers stay where they are. fully_shard cannot tell alone whether slices beyond the
// module that it is given overlap that module's; auto_shard sees the whole model and
// needs no call of this. What is sharded already is left alone. Local.
//
// Throws ValueError, with nothing changed, for a null module; for parameters and buffers
// that have elements in common without being one tensor, naming both; and for a parameter
// of such a storage that belongs to a live graph, or that something else than the
// module's parameters and buffers uses as well, such as a view that the model keeps.
FSDP_API void separate_storages(ModuleRef module);

}  // namespace fsdp
