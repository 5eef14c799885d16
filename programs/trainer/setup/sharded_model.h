// The transformer of a run, from its options to shards on this rank.
#pragma once

#include "device_mesh/device_mesh.h"
#include "programs/trainer/model/transformer.h"
#include "programs/trainer/setup/training_options.h"

#include <cstdint>
#include <string>
#include <vector>

namespace programs {

// Throws ValueError, naming --tp, --ep, --cp or --replicas, unless they divide the ranks.
void check_mesh(const TrainingOptions& options, int64_t ranks);

// The job's ranks as {"replicate", "dp", "ep", "cp", "tp"}, without those that were not
// asked for.
// Throws ValueError as check_mesh() does.
struct MeshDims {
  std::vector<int64_t> shape;
  std::vector<std::string> names;
};
MeshDims mesh_dims(const TrainingOptions& options, int64_t ranks);
// Collective over the world.
fsdp::DeviceMesh mesh_of(const TrainingOptions& options, int64_t ranks);

// The mesh that parameters are sharded over, of mesh_of().
fsdp::DeviceMesh data_mesh_of(const TrainingOptions& options, const fsdp::DeviceMesh& mesh);

// Those that some unit is sharded over: that one, and the experts' where they are cut.
std::vector<fsdp::DeviceMesh> meshes_of_units(const TrainingOptions& options,
                                              const fsdp::DeviceMesh& mesh);

// Unsharded, on the device of the options: the same on every rank. With init_from what
// the folder has; collective over the world then.
Transformer make_model(const TrainingOptions& options);

// Of `model`, which becomes the result, whatever values it has. The units are those of
// the options; the root takes what is left: of blocks the last norm, and an embedding
// that is the head, too. Collective over `mesh`.
struct ShardedModel {
  Transformer model;
  double unsharded_bytes;  // of the parameters
};
ShardedModel shard_model(Transformer model, const TrainingOptions& options,
                         const fsdp::DeviceMesh& mesh);

// The weights of make_model() on shards. Collective over `mesh`.
ShardedModel make_sharded_model(const TrainingOptions& options, const fsdp::DeviceMesh& mesh);

}  // namespace programs
