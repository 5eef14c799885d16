// What one rank tells the others after a step, for reports and for losses over the global
// batch.
#pragma once

#include "device_mesh/device_mesh.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace programs {

struct RankMetrics {
  double loss = 0;               // mean over this rank's micro-batch
  double training_seconds = 0;   // since the start of training
  double waiting_seconds = 0;    // of these, waiting for communication
  double computing_seconds = 0;  // of these, neither that nor the exchange of losses
  double shard_bytes = 0;        // this rank's shards of the parameters
  // The highest sum of unsharded parameters, staging and full gradients: of all steps so
  // far, and of the last one.
  double sharding_peak_bytes = 0, step_peak_bytes = 0;
  double resident_peak_bytes = 0;  // of the whole process
};

// Row r, on the CPU, is rank r's `mine`, of one dimension and as long on every rank.
// Collective over the mesh.
at::Tensor rows_of_ranks(const at::Tensor& mine, const fsdp::DeviceMesh& mesh);

// Everyone's metrics, by rank; the same on all ranks. Collective over the mesh.
std::vector<RankMetrics> exchange(const RankMetrics& mine, const fsdp::DeviceMesh& mesh);

double mean_loss(const std::vector<RankMetrics>& ranks);
double mean_waiting_seconds(const std::vector<RankMetrics>& ranks);
// The highest resident memory this process has had.
double resident_peak_bytes();

}  // namespace programs
