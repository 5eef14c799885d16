// One save on one rank, in three steps, so that the last may run in the background:
// agreeing on what is saved, taking the values, and writing and committing.
//
//   Saving saving("runs/step-1", options);
//   saving.begin(state);
//   saving.take(staging, /*staged_bytes=*/0);
//   saving.finish(world);
#pragma once

#include "checkpoint/checkpoint.h"
#include "checkpoint/io/commit.h"
#include "checkpoint/io/file_writing.h"
#include "checkpoint/plan/save_plan.h"
#include "checkpoint/ranks/world.h"
#include "checkpoint/save/per_rank.h"

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::internal::checkpoint {

class Saving {
 public:
  Saving(const std::string& path, SaveOptions options);

  // Plans, and makes the hidden folder. `before` comes first; what it throws, all ranks
  // throw. Collective over the default group; throws on all ranks alike.
  void begin(const State& state, const std::function<void()>& before);
  // Writes values, or copies the last `staged_bytes` of this rank's. Afterwards the state
  // may change. Full layout: collective over the meshes and the default group. What fails
  // is told by finish().
  void take(StagingBuffer& staging, int64_t staged_bytes);
  // Writes the rest and renames. Collective over `world`, the same ranks; throws on all
  // ranks alike.
  void finish(const World& world);

 private:
  void plan(const State& state);
  void begin_commit(const State& state);
  void agree_on_plan(const std::vector<std::string>& texts, const std::string& writes);
  void merge();
  void write_rest(const World& world);
  void commit(const World& world);
  bool is_full() const;

  const std::string path_, what_;
  const SaveOptions options_;
  const World world_;
  std::string id_;
  std::vector<SaveItem> items_;
  PerRank per_rank_;
  SavePlan plan_;
  Json values_ = Json::object(), scheduler_;  // rank 0's
  std::optional<Commit> commit_;              // rank 0's
  std::optional<FileWriting> writing_;
  Failure failure_;  // of take()
};

}  // namespace fsdp::internal::checkpoint
