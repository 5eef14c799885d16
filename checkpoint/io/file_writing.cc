#include "checkpoint/io/file_writing.h"

#include "checkpoint/files/checksums.h"
#include "checkpoint/files/file_calls.h"
#include "device_mesh/internal/accelerator.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

namespace fsdp::internal::checkpoint {
namespace {

constexpr int64_t kStagedAlignment = 64;

}  // namespace

int64_t staged_size(int64_t bytes) {
  return (bytes + kStagedAlignment - 1) / kStagedAlignment * kStagedAlignment;
}

void StagingBuffer::restart(int64_t bytes) {
  used_ = 0;
  if (memory_.defined() && memory_.numel() >= bytes) return;
  // First: both would be too much.
  memory_ = at::Tensor();
  // Copies from an accelerator are faster then.
  const bool pinned = visible_accelerator().has_value();
  memory_ = at::empty({bytes}, at::TensorOptions(at::kByte).pinned_memory(pinned));
}

at::Tensor StagingBuffer::copy(const at::Tensor& value, c10::ScalarType dtype) {
  const c10::NoGradGuard no_grad;
  const int64_t bytes = value.numel() * static_cast<int64_t>(c10::elementSize(dtype));
  const int64_t size = staged_size(bytes);
  at::Tensor target;
  if (bytes == 0 || !memory_.defined() || used_ + size > memory_.numel()) {
    target = at::empty(value.sizes(), at::TensorOptions(dtype));
  } else {
    target = memory_.narrow(0, used_, bytes).view(dtype).view(value.sizes());
    used_ += size;
  }
  target.copy_(value.detach());
  return target;
}

void lay_out(FileToWrite& file) {
  std::vector<Entry> entries;
  std::map<std::string, PartToWrite> parts;
  for (PartToWrite& part : file.parts) {
    entries.push_back(part.entry);
    parts.emplace(part.entry.name, std::move(part));
  }
  lay_out(entries);
  file.parts.clear();
  for (Entry& entry : entries) {
    PartToWrite part = std::move(parts.at(entry.name));
    part.entry = std::move(entry);
    file.parts.push_back(std::move(part));
  }
}

namespace {

// A file that is hashed while it is written.
class HashedFile {
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

// Writes one safetensors file and the checksums beside it, hashing bytes while they are
// written. Contiguous CPU tensors are written from where they lie; others through a copy
// of one tensor at a time. A file that was not finished is the caller's to remove.
class ShardWriter {
 public:
  // `entries` are laid out; values are written in their order. `sharded`: see
  // format_header().
  static absl::StatusOr<ShardWriter> create(const std::string& path, std::vector<Entry> entries,
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

  // Converts to the entry's dtype. REQUIRES: the next entry's box, by shape.
  absl::Status write(const at::Tensor& value) {
    const c10::NoGradGuard no_grad;
    const Entry& entry = entries_[next_++];
    if (entry.begin == entry.end) return absl::OkStatus();
    TORCH_INTERNAL_ASSERT(value.sizes() == c10::IntArrayRef(lengths_of(entry.box)), entry.name);
    const at::Tensor plain =
        value.detach().resolve_conj().resolve_neg().to(c10::kCPU, entry.dtype).contiguous();
    return file_->write(plain.const_data_ptr(), entry.end - entry.begin);
  }

  // Both files are synced; their folder is not.
  absl::StatusOr<WrittenFile> finish() {
    const std::string sums = file_->finish_sums();
    absl::Status status = file_->file().sync_and_close();
    if (status.ok()) status = write_file(path_ + kChecksumSuffix, sums);
    if (!status.ok()) return status;
    return WrittenFile{file_->bytes(), checksum_text(sums)};
  }

 private:
  ShardWriter(std::string path, std::vector<Entry> entries, std::unique_ptr<HashedFile> file)
      : path_(std::move(path)), entries_(std::move(entries)), file_(std::move(file)) {}

  std::string path_;
  std::vector<Entry> entries_;
  std::unique_ptr<HashedFile> file_;
  size_t next_ = 0;
};

int64_t bytes_of_rank(const std::vector<FileToWrite>& files, int64_t rank) {
  int64_t bytes = 0;
  for (const FileToWrite& file : files) {
    if (file.rank != rank) continue;
    for (const PartToWrite& part : file.parts) bytes += staged_size(bytes_of(part.entry));
  }
  return bytes;
}

// The box of `part` in `value`, what this rank has of its tensor.
at::Tensor box_in(const at::Tensor& value, const PartToWrite& part) {
  at::Tensor box = value;
  for (size_t dim = 0; dim < part.begin.size(); ++dim) {
    box = box.narrow(static_cast<int64_t>(dim), part.begin[dim], part.entry.box[dim].length);
  }
  return box;
}

}  // namespace

struct FileWriting::Open {
  FileToWrite file;
  std::optional<ShardWriter> writer;
  std::vector<at::Tensor> copies;  // of the last parts
};

FileWriting::FileWriting(std::string folder, int64_t rank)
    : folder_(std::move(folder)), rank_(rank) {}
FileWriting::~FileWriting() = default;

void FileWriting::take(std::vector<FileToWrite> files, const ValueOf& value_of,
                       StagingBuffer& staging, int64_t staged_bytes) {
  const int64_t all = bytes_of_rank(files, rank_);
  const int64_t at_once = std::max<int64_t>(0, all - staged_bytes);
  if (at_once < all) staging.restart(all - at_once);
  int64_t taken = 0;
  for (FileToWrite& file : files) {
    const bool is_mine = file.rank == rank_;
    Open open{.file = std::move(file)};
    for (PartToWrite& part : open.file.parts) {
      const at::Tensor value = box_in(value_of(open.file.kind, part.tensor), part);
      part.tensor = at::Tensor();
      if (!is_mine || !status_.ok()) continue;
      if (taken < at_once) {
        status_ = write(open, value);
      } else {
        open.copies.push_back(staging.copy(value, part.entry.dtype));
      }
      taken += staged_size(bytes_of(part.entry));
    }
    if (is_mine) mine_.push_back(std::move(open));
  }
}

absl::Status FileWriting::open(Open& open) {
  std::vector<Entry> entries;
  for (const PartToWrite& part : open.file.parts) entries.push_back(part.entry);
  auto created = ShardWriter::create(folder_ + "/" + open.file.path, std::move(entries),
                                     open.file.metadata, open.file.kind == FileKind::kBoxes);
  if (!created.ok()) return created.status();
  open.writer.emplace(*std::move(created));
  return absl::OkStatus();
}

absl::Status FileWriting::write(Open& open, const at::Tensor& value) {
  if (!open.writer) {
    if (auto opened = this->open(open); !opened.ok()) return opened;
  }
  return open.writer->write(value);
}

absl::StatusOr<WrittenFiles> FileWriting::finish() {
  if (!status_.ok()) return status_;
  WrittenFiles written;
  for (Open& each : mine_) {
    if (!each.writer) {
      if (auto opened = open(each); !opened.ok()) return opened;
    }
    for (const at::Tensor& copy : each.copies) {
      if (auto wrote = each.writer->write(copy); !wrote.ok()) return wrote;
    }
    auto file = each.writer->finish();
    if (!file.ok()) return file.status();
    written[each.file.path] = *std::move(file);
  }
  return written;
}

}  // namespace fsdp::internal::checkpoint
