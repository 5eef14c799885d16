#include "programs/trainer/report/report.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace programs {
namespace {

constexpr double kMiB = 1024.0 * 1024.0;
constexpr int64_t kLinesPerRun = 20;

double share(double part, double whole) { return whole > 0 ? 100 * part / whole : 0; }

}  // namespace

Report::Report(int64_t rank, int64_t steps, int64_t tokens_per_step)
    : prints_(rank == 0),
      terminal_(isatty(STDOUT_FILENO) == 1),
      steps_(steps),
      tokens_per_step_(tokens_per_step) {}

void Report::say(const std::string& line) {
  if (!prints_) return;
  if (line_open_) std::printf("\n");
  line_open_ = false;
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

bool Report::due(int64_t step) const {
  const int64_t period = std::max<int64_t>(1, steps_ / kLinesPerRun);
  return terminal_ || step == 1 || step == steps_ || step % period == 0;
}

void Report::step(int64_t step, const std::vector<RankMetrics>& ranks,
                  std::optional<double> unsharded_loss, const std::string& note) {
  if (!prints_ || !due(step)) return;
  double resident = 0;
  for (const auto& rank : ranks) resident = std::max(resident, rank.resident_peak_bytes);
  const double seconds = ranks[0].training_seconds - shown_seconds_;
  const double tokens = static_cast<double>((step - shown_step_) * tokens_per_step_);
  std::printf("%sstep %*lld/%lld  loss %.4f", terminal_ ? "\r" : "", 4,
              static_cast<long long>(step), static_cast<long long>(steps_), mean_loss(ranks));
  if (unsharded_loss) std::printf("  unsharded %.4f", *unsharded_loss);
  std::printf("  %.0f tokens/s  peak %.0f MiB/rank  waiting %.0f %%%s%s%s", tokens / seconds,
              resident / kMiB, share(mean_waiting_seconds(ranks) - shown_waiting_, seconds),
              note.empty() ? "" : "  ", note.c_str(), terminal_ ? "\033[K" : "\n");
  std::fflush(stdout);
  line_open_ = terminal_;
  shown_step_ = step;
  shown_seconds_ = ranks[0].training_seconds;
  shown_waiting_ = mean_waiting_seconds(ranks);
}

void Report::start_after(int64_t step) { shown_step_ = step; }

void Report::time_table(const PhaseTimes& times) {
  if (!prints_) return;
  say("");
  double total = 0;
  for (Phase phase : kPhases) total += times.of(phase).seconds;
  std::printf("time of rank 0         seconds   share   waiting for communication\n");
  for (Phase phase : kPhases) {
    const auto time = times.of(phase);
    if (time.seconds == 0) continue;
    std::printf("  %-18s %9.2f  %4.0f %%  %9.2f s\n", name(phase), time.seconds,
                share(time.seconds, total), time.waiting);
  }
  std::fflush(stdout);
}

void Report::memory_table(const std::vector<RankMetrics>& ranks, double unsharded_bytes) {
  if (!prints_) return;
  say("");
  std::printf("memory (MiB)           parameter shards   sharding's peak   process peak\n");
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    std::printf("  rank %-14zu %18.2f %17.2f %14.0f\n", rank, ranks[rank].shard_bytes / kMiB,
                ranks[rank].sharding_peak_bytes / kMiB, ranks[rank].resident_peak_bytes / kMiB);
  }
  std::printf(
      "  the whole model's parameters: %.2f MiB; its gradients and AdamW's two moments add three "
      "times that, all\n"
      "  of it sharded. Sharding's peak: parameters gathered, staging and full gradients at one "
      "moment.\n",
      unsharded_bytes / kMiB);
  std::fflush(stdout);
}

}  // namespace programs
