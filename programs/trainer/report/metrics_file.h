// One line of JSON for each step, which plots and importers of TensorBoard read: step,
// loss, learning_rate, gradient_norm, tokens_per_second, waiting (a share of the time, of
// all ranks' mean) and peak_bytes (of the process that had most).
#pragma once

#include "programs/trainer/report/rank_metrics.h"

#include <cstdint>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

namespace programs {

class MetricsFile {
 public:
  // Appends to `path`; rank 0 alone writes. Empty: no file. Throws ValueError where it
  // cannot be opened.
  MetricsFile(const std::string& path, int64_t rank, int64_t tokens_per_step);

  bool is_wanted() const { return is_wanted_; }
  // `ranks` is what exchange() returned. Throws c10::Error where nothing can be written.
  void step(int64_t step, const std::vector<RankMetrics>& ranks, double learning_rate,
            std::optional<double> gradient_norm);

 private:
  const std::string path_;
  const bool is_wanted_;
  const int64_t tokens_per_step_;
  std::ofstream file_;
  double seconds_ = 0, waiting_ = 0;  // up to the step before
};

}  // namespace programs
