// Writes a checkpoint anew in another layout, on one process: for Python's readers, or
// from somebody else's files into a checkpoint.
//
//   fsdp::convert_checkpoint("runs/step-1000", "export", {.layout = fsdp::Layout::kFull});
#pragma once

#include "checkpoint/checkpoint.h"
#include "device_mesh/api.h"

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace fsdp {

struct ConvertOptions {
  Layout layout = Layout::kFull;
  int64_t ranks = 1;  // kSharded: as if so many ranks had saved it, cut along dimension 0
  bool overwrite = false;
  std::optional<c10::ScalarType> model_dtype = {};  // kFull, as in SaveOptions
  int64_t max_file_bytes = 5'000'000'000;           // kFull
  // The name in `to` of a name in `from`, as in SaveOptions; null: the same.
  std::function<std::string(const std::string&)> name_in_file = {};
};

// `from`: whatever load() reads; without a manifest its tensors become the model. Every
// byte is verified that has a checksum; a warning names what is not read.
// Values, step, scheduler and the optimizers' options are kept, and per-rank items are
// not. Holds all tensors of the checkpoint in memory, each allocated once the files are
// known to have it. Local. Throws as save() and load() do; what is wrong with `from`
// begins with "convert: " and its path.
FSDP_API void convert_checkpoint(const std::string& from, const std::string& to,
                                 ConvertOptions options = {});

}  // namespace fsdp
