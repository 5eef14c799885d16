#include "checkpoint/io/verified_file.h"

#include "checkpoint/files/checksums.h"
#include "checkpoint/files/file_checks.h"
#include "checkpoint/format/torch_file/torch_file.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace fsdp::internal::checkpoint {
namespace {

absl::StatusOr<std::string> read_sums(const StoredFile& stored, int64_t bytes) {
  const std::string path = stored.path + kChecksumSuffix;
  auto sums = read_file(path);
  if (!sums.ok()) return sums.status();
  if (static_cast<int64_t>(sums->size()) != checksum_bytes(bytes) ||
      checksum_text(*sums) != stored.checksum) {
    return absl::DataLossError(path + ": not the checksums that the manifest speaks of");
  }
  return sums;
}

}  // namespace

VerifiedFile::VerifiedFile(InputFile file, Header header, std::string sums)
    : file_(std::move(file)), header_(std::move(header)), sums_(std::move(sums)) {
  for (const Entry& entry : header_.entries) by_tensor_.emplace(entry.tensor, &entry);
}

absl::StatusOr<VerifiedFile> VerifiedFile::open(const StoredFile& stored, bool verify) {
  auto file = InputFile::open(stored.path);
  if (!file.ok()) return file.status();
  const auto begin = beginning_of(*file);
  if (!begin.ok()) return begin.status();
  if (auto itself = check_is_itself(*begin, stored.path); !itself.ok()) return itself;
  if (stored.bytes >= 0 && file->bytes() != stored.bytes) {
    return absl::DataLossError(stored.path + ": has " + std::to_string(file->bytes()) +
                               " bytes, and " + std::to_string(stored.bytes) + " were saved");
  }
  std::string sums;
  if (verify && !stored.checksum.empty()) {
    auto read = read_sums(stored, file->bytes());
    if (!read.ok()) return read.status();
    sums = *std::move(read);
  }
  if (!stored.has_header) return VerifiedFile(*std::move(file), Header(), {});
  auto header = read_header(*file);
  if (!header.ok()) return header.status();
  const int64_t header_bytes = header->data_begin;
  VerifiedFile verified(*std::move(file), *std::move(header), std::move(sums));
  if (verified.sums_.empty()) return verified;
  BlockBuffer buffer;
  for (int64_t block = 0; block * kMebibyte < header_bytes; ++block) {
    if (auto filled = verified.fill(buffer, block); !filled.ok()) return filled;
  }
  return verified;
}

absl::StatusOr<StoredElements> VerifiedFile::find(const std::string& tensor, const StoredBox& box,
                                                  c10::ScalarType dtype) const {
  if (header_.data_begin > 0) return find_in_header(tensor, box.box, dtype);
  if (box.archive_bytes > 0) return find_in_archive(tensor, box, dtype);
  return box.elements;
}

absl::StatusOr<StoredElements> VerifiedFile::find_in_header(const std::string& tensor,
                                                            const Box& box,
                                                            c10::ScalarType dtype) const {
  const auto [begin, end] = by_tensor_.equal_range(tensor);
  const auto found =
      std::find_if(begin, end, [&](const auto& item) { return item.second->box == box; });
  if (found == end) {
    return absl::DataLossError(file_.path() + ": '" + tensor + "' " + to_string(box) +
                               " is not in it, though the manifest says so");
  }
  if (found->second->dtype == dtype) return StoredElements{.begin = found->second->begin};
  return absl::DataLossError(file_.path() + ": '" + tensor + "' has another dtype there");
}

absl::StatusOr<StoredElements> VerifiedFile::find_in_archive(const std::string& tensor,
                                                             const StoredBox& box,
                                                             c10::ScalarType dtype) const {
  auto found = tensors_of_archive(file_, box.elements.begin, box.archive_bytes);
  if (!found.ok()) return found.status();
  if (found->tensors.size() == 1 && found->tensors.front().dtype == dtype &&
      found->tensors.front().shape == lengths_of(box.box)) {
    ArchivedTensor& only = found->tensors.front();
    return StoredElements{only.begin, std::move(only.strides), only.conj, only.neg};
  }
  return absl::DataLossError(file_.path() + ": '" + tensor + "' " + to_string(box.box) +
                             " is not where the metadata says");
}

int64_t VerifiedFile::block_bytes(int64_t block) const {
  return std::min(kMebibyte, file_.bytes() - block * kMebibyte);
}

absl::Status VerifiedFile::check(const void* data, int64_t bytes, int64_t block) const {
  if (sums_.empty() || checksum_of(data, bytes) == checksum_at(sums_, block)) {
    return absl::OkStatus();
  }
  std::string text = file_.path() + ": MiB " + std::to_string(block) + " is damaged; it holds";
  const int64_t begin = block * kMebibyte - header_.data_begin;
  for (const Entry& entry : header_.entries) {
    if (entry.begin < begin + bytes && entry.end > begin) text += " '" + entry.name + "'";
  }
  return absl::DataLossError(text);
}

absl::Status VerifiedFile::read_block(void* target, int64_t block) const {
  const int64_t bytes = block_bytes(block);
  if (auto read = file_.read_at(target, bytes, block * kMebibyte); !read.ok()) return read;
  return check(target, bytes, block);
}

absl::Status VerifiedFile::fill(BlockBuffer& buffer, int64_t block) const {
  if (buffer.file == this && buffer.block == block) return absl::OkStatus();
  buffer.file = nullptr;
  buffer.bytes.resize(static_cast<size_t>(kMebibyte));
  if (auto read = read_block(buffer.bytes.data(), block); !read.ok()) return read;
  buffer.bytes_read += block_bytes(block);
  buffer.file = this;
  buffer.block = block;
  return absl::OkStatus();
}

absl::Status VerifiedFile::read(void* target, int64_t bytes, int64_t offset,
                                BlockBuffer& buffer) const {
  auto* next = static_cast<char*>(target);
  offset += header_.data_begin;
  if (offset < 0 || bytes > file_.bytes() - offset) {
    return absl::DataLossError(file_.path() + ": ends too early");
  }
  while (bytes > 0) {
    const int64_t block = offset / kMebibyte, skip = offset % kMebibyte;
    const int64_t count = std::min(bytes, block_bytes(block) - skip);
    if (count == block_bytes(block)) {
      if (auto read = read_block(next, block); !read.ok()) return read;
      buffer.bytes_read += count;
    } else {
      if (auto filled = fill(buffer, block); !filled.ok()) return filled;
      std::memcpy(next, buffer.bytes.data() + skip, static_cast<size_t>(count));
    }
    next += count, offset += count, bytes -= count;
  }
  return absl::OkStatus();
}

absl::Status VerifiedFile::verify_all() const {
  BlockBuffer buffer;
  for (int64_t block = 0; block * kMebibyte < file_.bytes(); ++block) {
    if (auto filled = fill(buffer, block); !filled.ok()) return filled;
  }
  return absl::OkStatus();
}

}  // namespace fsdp::internal::checkpoint
