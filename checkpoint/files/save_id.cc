#include "checkpoint/files/save_id.h"

#include "checkpoint/files/checksums.h"

#include <chrono>
#include <random>

namespace fsdp::internal::checkpoint {

std::string new_save_id() {
  std::random_device random;
  const uint64_t number = (uint64_t{random()} << 32) ^ random();
  return checksum_text({reinterpret_cast<const char*>(&number), sizeof(number)});
}

int64_t now_ns() {
  using std::chrono::nanoseconds;
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<nanoseconds>(now).count();
}

}  // namespace fsdp::internal::checkpoint
