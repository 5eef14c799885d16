#include "examples/batch_loss.h"

namespace examples {

torch::Tensor batch_loss(Transformer& model, const Batch& batch) {
  if (!batch.begins.defined()) return next_token_loss(model->forward(batch.inputs), batch.targets);
  return next_token_loss(model->forward(batch.inputs, documents_of(batch.begins)), batch.targets,
                         batch.target_count);
}

}  // namespace examples
