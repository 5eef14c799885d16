// What a file holds beside the tensors that can be read, and why it is not read: nothing
// is passed over quietly.
#pragma once

#include <string>

namespace fsdp::internal::checkpoint {

struct Unread {
  std::string name;  // as a tensor at its place would be called
  std::string what;  // "a sparse tensor", "an object of argparse.Namespace"
  bool is_tensor = false;
};

}  // namespace fsdp::internal::checkpoint
