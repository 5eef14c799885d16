// What is looked at before a file is believed, be it ours or somebody else's: what it is
// by its first bytes, so that one that holds no weights is called what it is, that it
// sends its reader to no file outside of its folder, and what in it cannot be read. No
// torch here.
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

// Where a file may send its reader: whether `name`, which it gives of another beside it,
// is a path below the folder that both lie in: "model-00001.safetensors",
// "text/model.safetensors"; neither empty, nor absolute, nor with "..". Symbolic links
// are the owner's of the folder, as Hugging Face's cache has them, and are followed.
bool stays_in_folder(const std::string& name);

// "path: it names the file '../x' for 'weight', which lies outside of its folder"
std::string outside_of_folder(const std::string& path, const std::string& name,
                              const std::string& tensor);

// What a file holds beside the tensors that can be read, and why it is not read: nothing
// is passed over quietly.
struct Unread {
  std::string name;  // as a tensor at its place would be called
  std::string what;  // "a sparse tensor", "an object of argparse.Namespace"
  bool is_tensor = false;
};

}  // namespace fsdp::internal::checkpoint
