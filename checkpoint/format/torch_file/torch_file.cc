#include "checkpoint/format/torch_file/torch_file.h"

#include "checkpoint/files/checksums.h"
#include "checkpoint/files/errors.h"
#include "checkpoint/format/pickle/pickle.h"
#include "checkpoint/format/torch_file/pickled_tensors.h"
#include "dtensor/layout/shard_layout.h"

#include <caffe2/serialize/inline_container.h>
#include <caffe2/serialize/read_adapter_interface.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fsdp::internal::checkpoint {
namespace {

// From tensors that a pickle describes to bytes of a file, once it is known where the
// file's storages lie.

struct StoragePlace {
  int64_t begin = 0;  // in the file
  int64_t bytes = 0;
};

// The elements from a tensor's first to behind its last. Throws for impossible sizes.
int64_t extent_of(const PickledTensor& tensor) {
  int64_t numel = 1, extent = 1;
  bool is_impossible = false;
  for (const int64_t size : tensor.shape)
    is_impossible |= __builtin_mul_overflow(numel, size, &numel);
  if (numel == 0 && !is_impossible) return 0;
  for (size_t dim = 0; dim < tensor.shape.size(); ++dim) {
    int64_t way = 0;
    is_impossible |= __builtin_mul_overflow(tensor.shape[dim] - 1, tensor.strides[dim], &way);
    is_impossible |= __builtin_add_overflow(extent, way, &extent);
  }
  if (is_impossible) throw std::runtime_error("has an impossible shape");
  return extent;
}

bool is_contiguous(const PickledTensor& tensor) {
  const auto dense = contiguous_strides(tensor.shape);
  for (size_t dim = 0; dim < tensor.shape.size(); ++dim) {
    if (tensor.shape[dim] != 1 && tensor.strides[dim] != dense[dim]) return false;
  }
  return true;
}

bool lies_in_storage(const PickledTensor& tensor, const StoragePlace& storage) {
  const auto item_bytes = static_cast<int64_t>(c10::elementSize(tensor.dtype));
  int64_t end = 0;
  return !__builtin_add_overflow(tensor.offset, extent_of(tensor), &end) &&
         !__builtin_mul_overflow(end, item_bytes, &end) && end <= storage.bytes;
}

// As imag() of a complex tensor lies, in elements of its real dtype.
bool lies_as_imaginary_part(const PickledTensor& tensor) {
  const auto is_even = [](int64_t stride) { return stride % 2 == 0; };
  return tensor.offset % 2 == 1 &&
         std::all_of(tensor.strides.begin(), tensor.strides.end(), is_even);
}

// LibTorch writes the dtype of a storage once, that of the first tensor in it. So the
// imaginary part of a conjugate, a real tensor with the negative bit, is described as
// complex behind the conjugate, and then lies outside of the storage. What else has that
// bit and a complex dtype may be either.
void resolve_dtype(PickledTensor& tensor, const StoragePlace& storage) {
  if (!tensor.neg || !c10::isComplexType(tensor.dtype)) return;
  if (!lies_as_imaginary_part(tensor) || lies_in_storage(tensor, storage)) {
    throw std::runtime_error("has the bit of a negated real tensor and is described as complex");
  }
  tensor.dtype = c10::toRealValueType(tensor.dtype);
}

ArchivedTensor placed(PickledTensor tensor, const StoragePlace& storage) {
  resolve_dtype(tensor, storage);
  const auto item_bytes = static_cast<int64_t>(c10::elementSize(tensor.dtype));
  const int64_t extent = extent_of(tensor);
  if (!lies_in_storage(tensor, storage)) {
    const bool may_be_real = c10::isComplexType(tensor.dtype);
    throw std::runtime_error(std::string("lies outside of its storage") +
                             (may_be_real ? ", as LibTorch writes a real view behind its complex "
                                            "tensor; save a clone() of it"
                                          : ""));
  }
  ArchivedTensor archived{.name = std::move(tensor.name), .dtype = tensor.dtype};
  archived.begin = storage.begin + tensor.offset * item_bytes;
  archived.conj = tensor.conj, archived.neg = tensor.neg;
  if (extent > 0 && !is_contiguous(tensor)) archived.strides = std::move(tensor.strides);
  archived.shape = std::move(tensor.shape);
  return archived;
}

// `find` throws std::exception for a storage that is not there. A tensor without its
// storage, or outside of it, becomes unread.
ArchivedTensors place_tensors(PickledTensors found,
                              const std::function<StoragePlace(const std::string& key)>& find) {
  ArchivedTensors archived{.unread = std::move(found.unread)};
  std::map<std::string, StoragePlace> places;
  for (PickledTensor& tensor : found.tensors) {
    const std::string name = tensor.name;
    try {
      auto place = places.find(tensor.storage);
      if (place == places.end()) {
        place = places.emplace(tensor.storage, find(tensor.storage)).first;
      }
      archived.tensors.push_back(placed(std::move(tensor), place->second));
    } catch (const std::exception& error) {
      archived.unread.push_back({name, "a tensor that " + plain_text_of(error), true});
    }
  }
  return archived;
}

// The zip archive of torch.save since 1.6.

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

// The file of torch.save before 1.6.

constexpr int64_t kFirstRead = int64_t{1} << 20;
constexpr int64_t kLongestPickle = int64_t{1} << 30;

// A file of five pickles, each read to its end: a magic number, a version, what the
// machine was like, the object, and the keys of its storages; then each storage's number
// of elements, in 8 bytes, and the elements. Throws std::exception.
class LegacyFile {
 public:
  explicit LegacyFile(const InputFile& file) : file_(file) {}

  ArchivedTensors run() {
    next_pickle();  // the magic number, by which it was recognised
    const Pickle version = next_pickle();
    if (version.root()->integer != 1001) throw std::runtime_error("its version is not 1001");
    const Pickle machine = next_pickle();
    const Pickled* const little = machine.root()->find("little_endian");
    if (little != nullptr && little->integer == 0) {
      throw std::runtime_error("its numbers are big-endian");
    }
    const Pickle object = next_pickle();
    const Pickle keys = next_pickle();
    find_storages(storages_in(object), *keys.root());
    return place_tensors(tensors_in(object), [&](const std::string& key) {
      const auto found = places_.find(key);
      if (found == places_.end()) throw std::runtime_error("has no storage in the file");
      return found->second;
    });
  }

 private:
  // Reads as much as it takes, twice as much each time.
  Pickle next_pickle() {
    for (int64_t wanted = kFirstRead;; wanted *= 2) {
      const int64_t bytes = std::min(wanted, file_.bytes() - at_);
      if (static_cast<int64_t>(front_.size()) < bytes) {
        front_.resize(static_cast<size_t>(bytes));
        const auto read = file_.read_at(front_.data(), bytes, at_);
        if (!read.ok()) throw std::runtime_error(std::string(read.message()));
      }
      auto pickle = Pickle::parse(front_, "its pickle");
      if (pickle.ok()) {
        at_ += static_cast<int64_t>(pickle->bytes());
        front_.erase(0, pickle->bytes());
        return *std::move(pickle);
      }
      const bool may_go_on = absl::IsOutOfRange(pickle.status()) && wanted < kLongestPickle &&
                             at_ + bytes < file_.bytes();
      if (!may_go_on) throw std::runtime_error(std::string(pickle.status().message()));
    }
  }

  void find_storages(const std::map<std::string, PickledStorage>& storages, const Pickled& keys) {
    for (const Pickled* key : keys.items) {
      const std::string name =
          key->is(Pickled::Kind::kInt) ? std::to_string(key->integer) : key->text;
      const auto storage = storages.find(name);
      if (storage == storages.end()) {
        throw std::runtime_error("it has a storage that nothing refers to");
      }
      int64_t numel = 0, bytes = 0;
      const auto read = file_.read_at(&numel, sizeof(numel), at_);
      if (!read.ok()) throw std::runtime_error(std::string(read.message()));
      at_ += static_cast<int64_t>(sizeof(numel));
      if (numel < 0 || __builtin_mul_overflow(numel, storage->second.element_bytes, &bytes) ||
          bytes > file_.bytes() - at_) {
        throw std::runtime_error("a storage of " + std::to_string(numel) +
                                 " elements is cut off, or none");
      }
      places_[name] = {at_, bytes};
      at_ += bytes;
    }
  }

  const InputFile& file_;
  std::string front_;  // of the file, from at_ on
  int64_t at_ = 0;
  std::map<std::string, StoragePlace> places_;
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

absl::StatusOr<ArchivedTensors> tensors_of_legacy_file(const InputFile& file) {
  try {
    return LegacyFile(file).run();
  } catch (const std::exception& error) {
    return unreadable(file, error);
  }
}

}  // namespace fsdp::internal::checkpoint
