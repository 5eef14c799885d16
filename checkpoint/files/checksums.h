// Checksums of a file, one XXH3-64 per MiB from its first byte: the .xxh3 file beside it
// is these numbers, little-endian. They find bit rot and truncation, not malice.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace fsdp::internal::checkpoint {

inline constexpr const char* kChecksumSuffix = ".xxh3";
inline constexpr int64_t kMebibyte = int64_t{1} << 20;

uint64_t checksum_of(const void* data, int64_t bytes);
// The CRC-32 of zip archives, of what has `before` and of `bytes` at `data` behind it.
uint32_t crc32_of(const void* data, int64_t bytes, uint32_t before = 0);
std::string checksum_text(std::string_view data);  // 16 hexadecimal digits

// Sums bytes as they come, in pieces of any size.
class ChecksumWriter {
 public:
  ChecksumWriter();
  ChecksumWriter(const ChecksumWriter&) = delete;
  ~ChecksumWriter();

  void update(const void* data, int64_t bytes);
  // The contents of the .xxh3 file. Ends the sums.
  std::string finish();

 private:
  void close_block();
  void append(uint64_t sum);

  void* state_;
  int64_t in_block_ = 0;
  std::string sums_;
};

// The sum of MiB `index` in the contents of an .xxh3 file. REQUIRES: it has it.
uint64_t checksum_at(std::string_view sums, int64_t index);
// The bytes of an .xxh3 file for a file of `bytes`.
int64_t checksum_bytes(int64_t bytes);

}  // namespace fsdp::internal::checkpoint
