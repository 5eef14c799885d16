#include "programs/trainer/batch_loss.h"

#include "device_mesh/all_reduce.h"

#include <algorithm>

namespace programs {
namespace {

int64_t targets_of(const std::vector<Batch>& batches) {
  int64_t sum = 0;
  for (const auto& batch : batches) sum += batch.target_count;
  return sum;
}

// Where there are none, losses are 0 whatever they are divided by.
double mean(int64_t targets, int64_t batches) {
  return static_cast<double>(std::max<int64_t>(targets, 1)) / static_cast<double>(batches);
}

}  // namespace

double mean_target_count(const std::vector<Batch>& batches, const fsdp::DeviceMesh& mesh) {
  if (!batches.front().begins.defined()) return mean_target_count(batches);
  return mean(fsdp::all_reduce(targets_of(batches), mesh),
              static_cast<int64_t>(batches.size()) * mesh.size());
}

double mean_target_count(const std::vector<Batch>& batches) {
  return mean(targets_of(batches), static_cast<int64_t>(batches.size()));
}

torch::Tensor batch_loss(Transformer& model, const Batch& batch, double mean_target_count) {
  if (!batch.begins.defined()) return next_token_loss(model->forward(batch.inputs), batch.targets);
  return next_token_loss(model->forward(batch.inputs, documents_of(batch.begins)), batch.targets,
                         mean_target_count);
}

}  // namespace programs
