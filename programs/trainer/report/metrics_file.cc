#include "programs/trainer/report/metrics_file.h"

#include <c10/util/Exception.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <utility>

namespace programs {

MetricsFile::MetricsFile(const std::string& path, int64_t rank, int64_t tokens_per_step)
    : path_(path), is_wanted_(!path.empty()), tokens_per_step_(tokens_per_step) {
  if (!is_wanted_ || rank != 0) return;
  file_.open(path, std::ios::app);
  TORCH_CHECK_VALUE(file_.is_open(), "--metrics: ", path, " cannot be opened");
}

void MetricsFile::step(int64_t step, const std::vector<RankMetrics>& ranks, double learning_rate,
                       std::optional<double> gradient_norm) {
  if (!file_.is_open()) return;
  const double waiting = mean_waiting_seconds(ranks);
  double peak = 0;
  for (const auto& rank : ranks) peak = std::max(peak, rank.resident_peak_bytes);
  const double now = ranks.front().training_seconds;
  const double seconds = now - std::exchange(seconds_, now);
  nlohmann::ordered_json line = {
      {"step", step}, {"loss", mean_loss(ranks)}, {"learning_rate", learning_rate}};
  line["gradient_norm"] = gradient_norm ? nlohmann::ordered_json(*gradient_norm) : nullptr;
  line["tokens_per_second"] = static_cast<double>(tokens_per_step_) / seconds;
  line["waiting"] = (waiting - std::exchange(waiting_, waiting)) / seconds;
  line["peak_bytes"] = static_cast<int64_t>(peak);
  file_ << line.dump() << std::endl;
  TORCH_CHECK(file_.good(), "--metrics: ", path_, " cannot be written");
}

}  // namespace programs
