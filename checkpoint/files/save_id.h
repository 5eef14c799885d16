// What tells one save from another.
#pragma once

#include <cstdint>
#include <string>

namespace fsdp::internal::checkpoint {

std::string new_save_id();  // 16 random hexadecimal digits
int64_t now_ns();           // since 1970

}  // namespace fsdp::internal::checkpoint
