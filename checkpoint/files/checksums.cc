#include "checkpoint/files/checksums.h"

#include <c10/util/Exception.h>
#include <caffe2/serialize/crc_alt.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace fsdp::internal::checkpoint {
namespace {

XXH3_state_t* state_of(void* state) { return static_cast<XXH3_state_t*>(state); }

}  // namespace

uint64_t checksum_of(const void* data, int64_t bytes) {
  return XXH3_64bits(data, static_cast<size_t>(bytes));
}

uint32_t crc32_of(const void* data, int64_t bytes, uint32_t before) {
  return crc32_fast(data, static_cast<size_t>(bytes), before);
}

std::string checksum_text(std::string_view data) {
  char text[17];
  std::snprintf(text, sizeof(text), "%016llx",
                static_cast<unsigned long long>(XXH3_64bits(data.data(), data.size())));
  return text;
}

ChecksumWriter::ChecksumWriter() : state_(XXH3_createState()) {
  TORCH_CHECK(state_ != nullptr, "no memory for a checksum");
  XXH3_64bits_reset(state_of(state_));
}

ChecksumWriter::~ChecksumWriter() { XXH3_freeState(state_of(state_)); }

void ChecksumWriter::update(const void* data, int64_t bytes) {
  const auto* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const int64_t count = std::min(bytes, kMebibyte - in_block_);
    if (count == kMebibyte) {  // quicker at once
      append(checksum_of(next, count));
      next += count, bytes -= count;
      continue;
    }
    XXH3_64bits_update(state_of(state_), next, static_cast<size_t>(count));
    next += count, bytes -= count, in_block_ += count;
    if (in_block_ == kMebibyte) close_block();
  }
}

void ChecksumWriter::close_block() {
  append(XXH3_64bits_digest(state_of(state_)));
  XXH3_64bits_reset(state_of(state_));
  in_block_ = 0;
}

void ChecksumWriter::append(uint64_t sum) {
  char bytes[sizeof(sum)];
  std::memcpy(bytes, &sum, sizeof(sum));
  sums_.append(bytes, sizeof(sum));
}

std::string ChecksumWriter::finish() {
  if (in_block_ > 0) close_block();
  return std::move(sums_);
}

uint64_t checksum_at(std::string_view sums, int64_t index) {
  uint64_t sum = 0;
  std::memcpy(&sum, sums.data() + static_cast<size_t>(index) * sizeof(sum), sizeof(sum));
  return sum;
}

int64_t checksum_bytes(int64_t bytes) {
  return (bytes + kMebibyte - 1) / kMebibyte * static_cast<int64_t>(sizeof(uint64_t));
}

}  // namespace fsdp::internal::checkpoint
