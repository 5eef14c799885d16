#include "checkpoint/io/shard_writer.h"

#include "checkpoint/files/checksums.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace fsdp::internal::checkpoint {

class ShardWriter::HashedFile {
 public:
  explicit HashedFile(OutputFile file) : file_(std::move(file)) {}

  // In pieces that end with the MiBs of the file. Each is hashed just before it is
  // written, which then finds it in the cache: cheaper than a thread that reads it again.
  absl::Status write(const void* data, int64_t bytes) {
    const auto* next = static_cast<const char*>(data);
    while (bytes > 0) {
      const int64_t count = std::min(kMebibyte - bytes_ % kMebibyte, bytes);
      sums_.update(next, count);
      if (auto written = file_.write(next, count); !written.ok()) return written;
      next += count, bytes -= count, bytes_ += count;
    }
    return absl::OkStatus();
  }

  OutputFile& file() { return file_; }
  int64_t bytes() const { return bytes_; }
  std::string finish_sums() { return sums_.finish(); }

 private:
  OutputFile file_;
  ChecksumWriter sums_;
  int64_t bytes_ = 0;
};

ShardWriter::ShardWriter(std::string path, std::vector<Entry> entries,
                         std::unique_ptr<HashedFile> file)
    : path_(std::move(path)), entries_(std::move(entries)), file_(std::move(file)) {}
ShardWriter::ShardWriter(ShardWriter&&) noexcept = default;
ShardWriter::~ShardWriter() = default;

absl::StatusOr<ShardWriter> ShardWriter::create(const std::string& path, std::vector<Entry> entries,
                                                std::map<std::string, std::string> metadata,
                                                bool sharded) {
  const int64_t data_bytes = entries.empty() ? 0 : entries.back().end;
  const std::string head = format_header(entries, std::move(metadata), sharded);
  auto created = OutputFile::create(path);
  if (!created.ok()) return created.status();
  auto file = std::make_unique<HashedFile>(*std::move(created));
  const auto head_bytes = static_cast<int64_t>(head.size());
  absl::Status status = file->file().reserve(head_bytes + data_bytes);
  if (status.ok()) status = file->write(head.data(), head_bytes);
  if (!status.ok()) return status;
  return ShardWriter(path, std::move(entries), std::move(file));
}

absl::Status ShardWriter::write(const at::Tensor& value) {
  const c10::NoGradGuard no_grad;
  const Entry& entry = entries_[next_++];
  if (entry.begin == entry.end) return absl::OkStatus();
  TORCH_INTERNAL_ASSERT(value.sizes() == c10::IntArrayRef(lengths_of(entry.box)), entry.name);
  const at::Tensor plain =
      value.detach().resolve_conj().resolve_neg().to(c10::kCPU, entry.dtype).contiguous();
  return file_->write(plain.const_data_ptr(), entry.end - entry.begin);
}

absl::StatusOr<WrittenFile> ShardWriter::finish() {
  const std::string sums = file_->finish_sums();
  absl::Status status = file_->file().sync_and_close();
  if (status.ok()) status = write_file(path_ + kChecksumSuffix, sums);
  if (!status.ok()) return status;
  return WrittenFile{file_->bytes(), checksum_text(sums)};
}

}  // namespace fsdp::internal::checkpoint
