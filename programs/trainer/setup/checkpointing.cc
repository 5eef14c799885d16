#include "programs/trainer/setup/checkpointing.h"

#include <c10/util/Exception.h>

#include <cstdio>

namespace programs {
namespace {

constexpr int64_t kKept = 2;

std::string path_of(const std::string& folder, int64_t step) {
  char name[32];
  std::snprintf(name, sizeof(name), "/step-%08lld", static_cast<long long>(step));
  return folder + name;
}

}  // namespace

void check_checkpoints(const CheckpointOptions& options) {
  if (options.folder.empty() || options.resume) return;
  const auto newest = fsdp::latest_checkpoint(options.folder);
  TORCH_CHECK_VALUE(!newest, "--checkpoint: ", options.folder, " has ", newest.value_or(""),
                    " of another run; --resume goes on from it, or name another folder");
}

int64_t Checkpointing::resume(const fsdp::State& state) const {
  if (!options_.resume) return 0;
  const auto newest = fsdp::latest_checkpoint(options_.folder);
  if (!newest) return 0;
  const auto loaded = fsdp::load(state, *newest);
  return loaded.values.at("steps_done").toInt();
}

void Checkpointing::save_if_due(int64_t step, int64_t steps, fsdp::State state) {
  if (options_.folder.empty()) return;
  if (step != steps && (options_.every == 0 || step % options_.every != 0)) return;
  finish();
  state.values.emplace("steps_done", step);
  saving_ = fsdp::async_save(state, path_of(options_.folder, step),
                             {.overwrite = true, .step = step, .keep_last = kKept});
  saving_step_ = step;
}

std::string Checkpointing::status() const {
  if (saving_step_ == 0) return {};
  return (saving_.is_done() ? "saved step " : "saving step ") + std::to_string(saving_step_);
}

void Checkpointing::finish() { saving_.wait(); }

}  // namespace programs
