#include "programs/trainer/report/rank_metrics.h"

#include "dtensor/dtensor.h"

#include <ATen/Functions.h>
#include <sys/resource.h>

namespace programs {
namespace {

double mean(double RankMetrics::*number, const std::vector<RankMetrics>& ranks) {
  double sum = 0;
  for (const auto& rank : ranks) sum += rank.*number;
  return sum / static_cast<double>(ranks.size());
}

}  // namespace

at::Tensor rows_of_ranks(const at::Tensor& mine, const fsdp::DeviceMesh& mesh) {
  // Row r of a distributed [ranks, numbers] tensor is rank r's.
  const std::vector<fsdp::Placement> by_rank(static_cast<size_t>(mesh.ndim()), fsdp::Shard{0});
  return fsdp::from_local(mine.unsqueeze(0).to(mesh.device_type()), mesh, by_rank)
      .full_tensor()
      .cpu();
}

std::vector<RankMetrics> exchange(const RankMetrics& mine, const fsdp::DeviceMesh& mesh) {
  const auto all =
      rows_of_ranks(at::tensor({mine.loss, mine.training_seconds, mine.waiting_seconds,
                                mine.computing_seconds, mine.shard_bytes, mine.sharding_peak_bytes,
                                mine.step_peak_bytes, mine.resident_peak_bytes},
                               at::kDouble),
                    mesh);
  auto value = all.accessor<double, 2>();
  std::vector<RankMetrics> ranks;
  for (int64_t rank = 0; rank < all.size(0); ++rank) {
    auto metrics = value[rank];
    ranks.push_back({metrics[0], metrics[1], metrics[2], metrics[3], metrics[4], metrics[5],
                     metrics[6], metrics[7]});
  }
  return ranks;
}

double mean_loss(const std::vector<RankMetrics>& ranks) { return mean(&RankMetrics::loss, ranks); }

double mean_waiting_seconds(const std::vector<RankMetrics>& ranks) {
  return mean(&RankMetrics::waiting_seconds, ranks);
}

double resident_peak_bytes() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) * 1024;
}

}  // namespace programs
