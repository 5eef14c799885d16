// The loss of the transformer of transformer.h on a batch of batches.h.
#pragma once

#include "device_mesh/device_mesh.h"
#include "programs/trainer/data/batches.h"
#include "programs/trainer/model/transformer.h"

#include <vector>

namespace programs {

// The mean number of targets of a batch, over the batches of all ranks of `mesh`, of
// which each rank passes as many. Collective over it where documents are separate;
// otherwise all batches have the same number.
double mean_target_count(const std::vector<Batch>& batches, const fsdp::DeviceMesh& mesh);
// Over these batches. Local.
double mean_target_count(const std::vector<Batch>& batches);

// Mean cross entropy in nats per token. Where documents are separate, batches have
// different numbers of targets: then it is the sum over this one's targets, by
// `mean_target_count`, so that the mean over batches is the mean over all of their
// targets. Where they are joined, `mean_target_count` is not looked at. A forward of
// `model`.
torch::Tensor batch_loss(Transformer& model, const Batch& batch, double mean_target_count);

}  // namespace programs
