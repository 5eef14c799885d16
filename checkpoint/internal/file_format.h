// What a file is by its first bytes, so that one that holds no weights is called what it
// is. No torch here.
#pragma once

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

}  // namespace fsdp::internal::checkpoint
