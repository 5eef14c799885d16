#include "checkpoint/internal/shard_writer.h"

#include "checkpoint/internal/checksums.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <future>
#include <utility>

namespace fsdp::internal::checkpoint {
namespace {

constexpr int64_t kPieceBytes = 8 * kMebibyte;

}  // namespace

class ShardWriter::HashedFile {
 public:
  explicit HashedFile(OutputFile file) : file_(std::move(file)) {}

  // In pieces, each hashed on another thread while it is written.
  absl::Status write(const void* data, int64_t bytes) {
    const auto* next = static_cast<const char*>(data);
    for (int64_t done = 0; done < bytes; done += kPieceBytes) {
      const int64_t count = std::min(kPieceBytes, bytes - done);
      const auto policy = count < kMebibyte ? std::launch::deferred : std::launch::async;
      auto hashed = std::async(policy, [&, piece = next + done] { sums_.update(piece, count); });
      const absl::Status written = file_.write(next + done, count);
      hashed.get();
      if (!written.ok()) return written;
    }
    bytes_ += bytes;
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
  c10::NoGradGuard no_grad;
  const Entry& entry = entries_[next_++];
  if (entry.begin == entry.end) return absl::OkStatus();
  TORCH_INTERNAL_ASSERT(value.sizes() == c10::IntArrayRef(lengths_of(entry.box)), entry.name);
  const at::Tensor plain = value.detach().to(c10::kCPU, entry.dtype).contiguous();
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
