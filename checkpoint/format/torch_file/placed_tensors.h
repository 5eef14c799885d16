// From tensors that a pickle describes to bytes of a file, once it is known where the
// file's storages lie.
#pragma once

#include "checkpoint/format/torch_file/pickled_tensors.h"
#include "checkpoint/format/torch_file/torch_archive.h"

#include <cstdint>
#include <functional>
#include <string>

namespace fsdp::internal::checkpoint {

struct StoragePlace {
  int64_t begin = 0;  // in the file
  int64_t bytes = 0;
};

// `find` throws std::exception for a storage that is not there. A tensor without its
// storage, or outside of it, becomes unread.
ArchivedTensors place_tensors(PickledTensors found,
                              const std::function<StoragePlace(const std::string& key)>& find);

}  // namespace fsdp::internal::checkpoint
