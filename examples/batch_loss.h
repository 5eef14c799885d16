// The loss of the transformer of transformer.h on a batch of batches.h.
#pragma once

#include "examples/batches.h"
#include "examples/transformer.h"

namespace examples {

// Mean cross entropy in nats per token. Where documents are separate the sum over the
// batch's targets, by batch.target_count: over all rows that are averaged, these are, in
// the mean, the mean loss of a target, however the rows are dealt out to ranks. A forward
// of `model`.
torch::Tensor batch_loss(Transformer& model, const Batch& batch);

}  // namespace examples
