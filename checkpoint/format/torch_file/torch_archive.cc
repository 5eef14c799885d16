#include "checkpoint/format/torch_file/torch_archive.h"

#include "checkpoint/files/checksums.h"
#include "checkpoint/files/plain_text.h"
#include "checkpoint/format/pickle/pickle.h"
#include "checkpoint/format/torch_file/placed_tensors.h"

#include <caffe2/serialize/inline_container.h>
#include <caffe2/serialize/read_adapter_interface.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <utility>
#include <vector>

namespace fsdp::internal::checkpoint {
namespace {

using caffe2::serialize::PyTorchStreamReader;

// A part of a file as a file.
class Range final : public caffe2::serialize::ReadAdapterInterface {
 public:
  Range(const InputFile& file, int64_t offset, int64_t length)
      : file_(file), offset_(offset), length_(length) {}
  size_t size() const override { return static_cast<size_t>(length_); }
  size_t read(uint64_t position, void* buffer, size_t count, const char*) const override {
    if (position >= size()) return 0;
    count = std::min(count, size() - static_cast<size_t>(position));
    const auto at = offset_ + static_cast<int64_t>(position);
    return file_.read_at(buffer, static_cast<int64_t>(count), at).ok() ? count : 0;
  }

 private:
  const InputFile& file_;
  const int64_t offset_, length_;
};

void require_in_archive(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error(what);
}

// Throws std::exception.
class Archive {
 public:
  Archive(const InputFile& file, int64_t offset, int64_t length)
      : file_(file),
        offset_(offset),
        end_(offset + length),
        reader_(std::make_shared<Range>(file, offset, length)) {}

  Pickle pickle() {
    require_in_archive(
        reader_.hasRecord("data.pkl"),
        reader_.hasRecord("model.json")
            ? "it is TorchScript or torch::save of LibTorch before 1.2, which is not read; "
              "load and save it with a newer one"
            : "a zip archive without data.pkl");
    if (reader_.hasRecord("byteorder")) {
      require_in_archive(text_of("byteorder") == "little", "its numbers are big-endian");
    }
    return pickle_in("data.pkl");
  }

  ArchivedTensors run() {
    const Pickle object = pickle();
    auto found = place_tensors(tensors_in(object),
                               [&](const std::string& key) { return find("data/" + key); });
    name_constants(*object.root(), found);
    return found;
  }

 private:
  // Tensors in the code of TorchScript, by the names that it has for them. They are all
  // that torch.jit.freeze leaves of parameters, and of the attribute `training` nothing.
  void name_constants(const Pickled& module, ArchivedTensors& found) {
    const std::string record = "constants.pkl";
    if (!reader_.hasRecord(record)) return;
    const PickledTensors constants = tensors_in(pickle_in(record));
    const bool is_frozen = module.state != nullptr && module.state->find("training") == nullptr;
    const std::string what =
        is_frozen ? "a constant in the code of TorchScript, as torch.jit.freeze makes of a "
                    "parameter; save the module that was frozen"
                  : "a constant in the code of TorchScript";
    const auto name = [&](const std::string& index) {
      found.unread.push_back({"CONSTANTS.c" + index, what, /*is_tensor=*/is_frozen});
    };
    for (const PickledTensor& each : constants.tensors) name(each.name);
    for (const Unread& each : constants.unread) name(each.name);
  }

  std::string text_of(const std::string& record) {
    constexpr size_t kLongest = size_t{1} << 30;
    const size_t claimed = reader_.getRecordSize(record);
    require_in_archive(claimed <= kLongest,
                       record + " claims to take " + std::to_string(claimed) + " bytes");
    const auto [data, bytes] = reader_.getRecord(record);
    check_crc(record, crc32_of(data.get(), static_cast<int64_t>(bytes)));
    return std::string(static_cast<const char*>(data.get()), bytes);
  }

  Pickle pickle_in(const std::string& record) {
    auto pickle = Pickle::parse(text_of(record), record);
    require_in_archive(pickle.ok(), std::string(pickle.status().message()));
    return *std::move(pickle);
  }

  StoragePlace find(const std::string& record) {
    require_in_archive(reader_.hasRecord(record), "has no storage in the file");
    StoragePlace place;
    place.begin = offset_ + static_cast<int64_t>(reader_.getRecordOffset(record));
    place.bytes = static_cast<int64_t>(reader_.getRecordSize(record));
    require_in_archive(
        place.bytes >= 0 && place.begin <= end_ - place.bytes && !is_compressed(record),
        "has a storage that is compressed or cut off");
    check_crc(record, crc_of(place));
    return place;
  }

  uint32_t crc_of(const StoragePlace& place) {
    uint32_t crc = 0;
    piece_.resize(static_cast<size_t>(std::min(place.bytes, kMebibyte)));
    for (int64_t done = 0; done < place.bytes; done += kMebibyte) {
      const auto bytes = std::min(place.bytes - done, kMebibyte);
      require_in_archive(file_.read_at(piece_.data(), bytes, place.begin + done).ok(),
                         "has a storage that cannot be read");
      crc = crc32_of(piece_.data(), bytes, crc);
    }
    return crc;
  }

  void check_crc(const std::string& record, uint32_t crc) {
    const auto saved = saved_crc(record);
    require_in_archive(!saved || *saved == crc,
                       "is damaged: record '" + record + "' has not the CRC-32 it was saved with");
  }

  // In the header of a record or, where this says so, behind its bytes. torch.save can be
  // told to leave it out, and writes zero then.
  std::optional<uint32_t> saved_crc(const std::string& record) {
    constexpr int64_t kFlags = 6, kCrc = 14;  // in the header
    constexpr uint16_t kIsBehind = 8;
    constexpr uint32_t kSignature = 0x08074b50;
    auto at = begin_of_header(record) + kCrc;
    if ((number_at<uint16_t>(begin_of_header(record) + kFlags) & kIsBehind) != 0) {
      if (is_compressed(record)) return std::nullopt;
      const auto end = reader_.getRecordOffset(record) + reader_.getRecordSize(record);
      at = offset_ + static_cast<int64_t>(end);
      if (number_at<uint32_t>(at) != kSignature) return std::nullopt;
      at += sizeof(kSignature);
    }
    const auto crc = number_at<uint32_t>(at);
    return crc == 0 ? std::nullopt : std::optional(crc);
  }

  // How a record is stored is said by the header before it, which ends in as much padding
  // as torch.save was told to align by.
  bool is_compressed(const std::string& record) {
    constexpr int64_t kMethod = 8;  // in the header
    return number_at<uint16_t>(begin_of_header(record) + kMethod) != 0;
  }

  int64_t begin_of_header(const std::string& record) {
    return offset_ + static_cast<int64_t>(reader_.getRecordHeaderOffset(record));
  }

  template <class Number>
  Number number_at(int64_t offset) const {
    Number number = 0;
    require_in_archive(file_.read_at(&number, sizeof(number), offset).ok(), "is cut off");
    return number;
  }

  const InputFile& file_;
  const int64_t offset_, end_;
  PyTorchStreamReader reader_;
  std::vector<char> piece_;  // of a storage, while it is checked
};

absl::Status unreadable(const InputFile& file, const std::exception& error) {
  return absl::DataLossError(
      file.path() + ": not a file of torch.save that can be read: " + plain_text_of(error));
}

}  // namespace

absl::StatusOr<ArchivedTensors> tensors_of_archive(const InputFile& file, int64_t offset,
                                                   int64_t length) {
  if (offset < 0 || length < 0 || length > file.bytes() || offset > file.bytes() - length) {
    return absl::DataLossError(file.path() + ": ends before byte " + std::to_string(offset) +
                               " and the " + std::to_string(length) + " behind it");
  }
  try {
    return Archive(file, offset, length).run();
  } catch (const std::exception& error) {
    return unreadable(file, error);
  }
}

absl::StatusOr<Pickle> pickle_of_archive(const std::string& path) {
  const auto file = InputFile::open(path);
  if (!file.ok()) return file.status();
  try {
    return Archive(*file, 0, file->bytes()).pickle();
  } catch (const std::exception& error) {
    return unreadable(*file, error);
  }
}

}  // namespace fsdp::internal::checkpoint
