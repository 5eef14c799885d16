#include "checkpoint/io/file_writing.h"

#include <algorithm>

namespace fsdp::internal::checkpoint {
namespace {

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
