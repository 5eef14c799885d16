// Where a file may send its reader: into its own folder alone. No torch here.
#pragma once

#include <string>

namespace fsdp::internal::checkpoint {

// Whether `name`, which a file gives of another beside it, is a path below the folder
// that both lie in: "model-00001.safetensors", "text/model.safetensors"; neither empty,
// nor absolute, nor with "..". Symbolic links are the owner's of the folder, as Hugging
// Face's cache has them, and are followed.
bool stays_in_folder(const std::string& name);

// "path: it names the file '../x' for 'weight', which lies outside of its folder"
std::string outside_of_folder(const std::string& path, const std::string& name,
                              const std::string& tensor);

}  // namespace fsdp::internal::checkpoint
