// What each rank has of its own: generators, a data loader's place. One safetensors file
// per rank; what is no tensor lies in its metadata as JSON.
#pragma once

#include "checkpoint/format/manifest.h"
#include "checkpoint/io/file_writing.h"
#include "checkpoint/ranks/world.h"

#include <ATen/core/ivalue.h>
#include <absl/status/statusor.h>

#include <cstdint>
#include <map>
#include <string>

namespace fsdp::internal::checkpoint {

using PerRank = std::map<std::string, c10::IValue>;

// This thread's view of the generators: "rng.manual_seed", where that holds, and
// LibTorch's default ones, "rng.cpu" and that of the accelerator that the process sees,
// "rng.cuda" or its like. Those are left out where the ranks are threads, which share
// them; ValueError where there is nothing else.
PerRank generator_states(const World& world);
// Takes the generators' entries out of `values` and sets them. Where default ones were
// saved alone, manual_seed no longer holds.
void restore_generators(PerRank& values);
// Drops them.
void forget_generators(PerRank& values);

// The file of this rank's items. Throws ValueError for values that cannot be saved.
FileToWrite per_rank_file(int64_t rank, const PerRank& values);
absl::StatusOr<PerRank> read_per_rank(const std::string& folder, const Manifest& manifest,
                                      int64_t rank, bool verify);

}  // namespace fsdp::internal::checkpoint
