#include "checkpoint/files/plain_text.h"
#include "checkpoint/format/pickle/pickle.h"
#include "checkpoint/format/torch_file/placed_tensors.h"
#include "checkpoint/format/torch_file/torch_archive.h"

#include <algorithm>
#include <exception>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>

namespace fsdp::internal::checkpoint {
namespace {

using Kind = Pickled::Kind;

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
      const std::string name = key->is(Kind::kInt) ? std::to_string(key->integer) : key->text;
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

}  // namespace

absl::StatusOr<ArchivedTensors> tensors_of_legacy_file(const InputFile& file) {
  try {
    return LegacyFile(file).run();
  } catch (const std::exception& error) {
    return absl::DataLossError(
        file.path() + ": not a file of torch.save that can be read: " + plain_text_of(error));
  }
}

}  // namespace fsdp::internal::checkpoint
