// Looks at checkpoints and converts them, for people.
//
//   checkpoint_tool inspect runs/step-1000
//   checkpoint_tool verify runs/step-1000
//   checkpoint_tool convert runs/step-1000 export --layout=full --dtype=bf16
#include "checkpoint/checkpoint.h"
#include "checkpoint/convert.h"
#include "checkpoint/inspect.h"

#include <absl/flags/flag.h>
#include <absl/flags/parse.h>
#include <absl/flags/usage.h>
#include <c10/util/Exception.h>

#include <exception>
#include <iostream>
#include <optional>
#include <string>
#include <vector>

ABSL_FLAG(std::string, layout, "full", "convert: full or sharded");
ABSL_FLAG(int64_t, ranks, 1, "convert to sharded: the number of ranks to cut for");
ABSL_FLAG(std::string, dtype, "",
          "convert to full: f32, bf16 or f16 for the model; default: as is");
ABSL_FLAG(int64_t, max_file_bytes, 5'000'000'000, "convert to full: the largest file");
ABSL_FLAG(bool, overwrite, false, "convert: replace the target");

namespace {

constexpr const char* kUsage =
    "looks at checkpoints and converts them.\n"
    "  inspect PATH       tables of tensors, bytes and layouts\n"
    "  verify PATH        reads every byte against its checksum\n"
    "  convert FROM TO    writes it anew: --layout, --ranks, --dtype, --max_file_bytes, "
    "--overwrite\n"
    "PATH is a checkpoint; inspect and convert also take folders and files of safetensors,\n"
    "folders of torch.distributed.checkpoint and files of torch.save.";

std::optional<c10::ScalarType> dtype_called(const std::string& name) {
  if (name.empty()) return std::nullopt;
  if (name == "f32") return c10::ScalarType::Float;
  if (name == "bf16") return c10::ScalarType::BFloat16;
  TORCH_CHECK_VALUE(name == "f16", "--dtype: ", name, ", allowed are f32, bf16 and f16");
  return c10::ScalarType::Half;
}

fsdp::ConvertOptions options_from_flags() {
  const std::string layout = absl::GetFlag(FLAGS_layout);
  TORCH_CHECK_VALUE(layout == "full" || layout == "sharded", "--layout: ", layout,
                    ", allowed are full and sharded");
  return {.layout = layout == "full" ? fsdp::Layout::kFull : fsdp::Layout::kSharded,
          .ranks = absl::GetFlag(FLAGS_ranks),
          .overwrite = absl::GetFlag(FLAGS_overwrite),
          .model_dtype = dtype_called(absl::GetFlag(FLAGS_dtype)),
          .max_file_bytes = absl::GetFlag(FLAGS_max_file_bytes)};
}

int run(const std::vector<std::string>& words) {
  if (words.size() == 2 && words[0] == "inspect") {
    std::cout << fsdp::describe_checkpoint(words[1]);
  } else if (words.size() == 2 && words[0] == "verify") {
    fsdp::verify_checkpoint(words[1]);
    std::cout << words[1] << ": every byte is as it was saved\n";
  } else if (words.size() == 3 && words[0] == "convert") {
    fsdp::convert_checkpoint(words[1], words[2], options_from_flags());
    std::cout << fsdp::describe_checkpoint(words[2]);
  } else {
    std::cerr << "checkpoint: " << kUsage << "\n";
    return 2;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage(kUsage);
  const auto words = absl::ParseCommandLine(argc, argv);
  try {
    return run({words.begin() + 1, words.end()});
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << '\n';
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
  }
  return 1;
}
