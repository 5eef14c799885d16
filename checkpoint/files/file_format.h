// What a file is by its first bytes, so that one that holds no weights is called what it
// is. No torch here.
#pragma once

#include "checkpoint/files/file_calls.h"

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <string>
#include <string_view>

namespace fsdp::internal::checkpoint {

enum class FileFormat {
  kSafetensors,
  kTorchZip,     // a zip archive, as torch.save writes since 1.6, and TorchScript
  kTorchLegacy,  // torch.save before 1.6
  kJson,         // such as the index of a folder's weights
  kOther,
};

// How much of a file's beginning is looked at.
inline constexpr size_t kRecognisedBytes = 512;

// `begin`: the file's first kRecognisedBytes, or all it has.
FileFormat format_of(std::string_view begin);

// Of kOther: what it is and what to do, "a Git LFS pointer, not the file itself: ...".
std::string describe_format(std::string_view begin);

// An error that says what the file at `path` is, where that is known and holds nothing
// that is read: a Git LFS pointer, a web page, an archive.
absl::Status check_is_itself(std::string_view begin, const std::string& path);

// The first kRecognisedBytes, or all that there are.
absl::StatusOr<std::string> beginning_of(const InputFile& file);

}  // namespace fsdp::internal::checkpoint
