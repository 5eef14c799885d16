// Keeps checkpoints of a training run in one folder, and takes the newest up again.
//
//   Checkpointing checkpointing({.folder = "runs", .every = 100, .resume = true});
//   const fsdp::State state{.model = model, .optimizer = optimizer};
//   for (int64_t step = checkpointing.resume(state) + 1; step <= steps; ++step) {
//     ...
//     checkpointing.save_if_due(step, steps, state);
//   }
//   checkpointing.finish();
#pragma once

#include "checkpoint/async_save.h"

#include <cstdint>
#include <string>
#include <utility>

namespace programs {

struct CheckpointOptions {
  std::string folder;  // empty: no checkpoints
  int64_t every = 0;   // steps; the last step is saved too. 0: the last alone
  bool resume = false;
};

// Throws ValueError where a new run would mix its checkpoints with another's. Local.
void check_checkpoints(const CheckpointOptions& options);

// All ranks call the same.
class Checkpointing {
 public:
  explicit Checkpointing(CheckpointOptions options) : options_(std::move(options)) {}

  // The steps that were done when the newest checkpoint was saved, which is loaded; 0
  // without one. Collective.
  int64_t resume(const fsdp::State& state) const;
  // Returns at once; the files are written in the background. Collective.
  void save_if_due(int64_t step, int64_t steps, fsdp::State state);
  // What the step line says: "saving step 100", "saved step 100", or nothing. Local.
  std::string status() const;
  // The last save stands, or what went wrong is thrown. Collective.
  void finish();

 private:
  const CheckpointOptions options_;
  fsdp::SaveHandle saving_;
  int64_t saving_step_ = 0;
};

}  // namespace programs
