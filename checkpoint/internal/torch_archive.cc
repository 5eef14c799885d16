#include "checkpoint/internal/torch_archive.h"

#include "checkpoint/internal/pickle.h"
#include "dtensor/internal/shard_layout.h"

#include <c10/util/Exception.h>
#include <caffe2/serialize/inline_container.h>
#include <caffe2/serialize/read_adapter_interface.h>

#include <algorithm>
#include <array>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string_view>
#include <utility>

namespace fsdp::internal::checkpoint {
namespace {

using c10::ScalarType;
using caffe2::serialize::PyTorchStreamReader;
using Kind = Pickled::Kind;

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

constexpr std::array<std::pair<std::string_view, ScalarType>, 11> kStorages = {{
    {"torch DoubleStorage", ScalarType::Double},
    {"torch FloatStorage", ScalarType::Float},
    {"torch HalfStorage", ScalarType::Half},
    {"torch BFloat16Storage", ScalarType::BFloat16},
    {"torch LongStorage", ScalarType::Long},
    {"torch IntStorage", ScalarType::Int},
    {"torch ShortStorage", ScalarType::Short},
    {"torch CharStorage", ScalarType::Char},
    {"torch ByteStorage", ScalarType::Byte},
    {"torch BoolStorage", ScalarType::Bool},
    {"torch ComplexFloatStorage", ScalarType::ComplexFloat},
}};

ScalarType dtype_of_storage(const std::string& name) {
  for (const auto& [storage, dtype] : kStorages) {
    if (storage == name) return dtype;
  }
  throw std::runtime_error("storages of the class '" + name + "' are not read");
}

void require(bool condition, const char* what) {
  if (!condition) throw std::runtime_error(what);
}

std::vector<int64_t> integers(const Pickled& sequence) {
  require(sequence.is(Kind::kSequence), "a shape is no tuple");
  std::vector<int64_t> values;
  for (const Pickled* item : sequence.items) {
    require(item->is(Kind::kInt) && item->integer >= 0, "a shape is no tuple of numbers");
    values.push_back(item->integer);
  }
  return values;
}

// Walks the object and notes tensors. Throws std::runtime_error.
class Archive {
 public:
  Archive(const InputFile& file, int64_t offset, int64_t length)
      : offset_(offset),
        end_(offset + length),
        reader_(std::make_shared<Range>(file, offset, length)) {}

  std::vector<ArchivedTensor> run(const std::string& what) {
    const auto [data, size] = reader_.getRecord("data.pkl");
    if (reader_.hasRecord("byteorder")) {
      const auto [order, bytes] = reader_.getRecord("byteorder");
      require(std::string_view(static_cast<const char*>(order.get()), bytes) == "little",
              "its numbers are big-endian");
    }
    auto pickle = Pickle::parse({static_cast<const char*>(data.get()), size}, what);
    require(pickle.ok(), std::string(pickle.status().message()).c_str());
    visit(*pickle->root(), "", 0);
    return std::move(found_);
  }

 private:
  static constexpr int kDeepest = 64;  // dictionaries in dictionaries
  static constexpr int kMost = 10'000'000;
  static constexpr std::string_view kRebuild = "torch._utils _rebuild";

  void visit(const Pickled& value, const std::string& name, int depth) {
    require(depth < kDeepest, "its dictionaries are nested too deep");
    require(++visited_ < kMost, "it refers to the same objects too often");
    if (is_tensor(value)) {
      add_tensor(value, name);
    } else if (value.calls("torch._utils _rebuild_parameter")) {
      require(!value.items[1]->items.empty(), "a parameter without a tensor");
      visit(*value.items[1]->items[0], name, depth + 1);
    } else if (value.is(Kind::kDict) || value.calls("collections OrderedDict")) {
      for (const auto& [key, each] : value.entries) {
        const std::string text = key->is(Kind::kInt) ? std::to_string(key->integer) : key->text;
        visit(*each, name.empty() ? text : name + "." + text, depth + 1);
      }
    } else if (value.is(Kind::kCall) && value.items[0]->text.starts_with(kRebuild)) {
      throw std::runtime_error("'" + name + "' is made by " + value.items[0]->text +
                               ", which is not read");
    }
  }

  static bool is_tensor(const Pickled& value) {
    return value.calls("torch._utils _rebuild_tensor_v2");
  }

  // _rebuild_tensor_v2(storage, offset, shape, strides, ...), where a storage is the
  // persistent id ("storage", class, record, device, elements).
  void add_tensor(const Pickled& value, const std::string& name) {
    const auto& arguments = value.items[1]->items;
    require(arguments.size() >= 4 && arguments[0]->is(Kind::kPersistent) &&
                arguments[1]->is(Kind::kInt),
            "a tensor is not stored as torch.save does");
    const Pickled& id = *arguments[0]->items[0];
    require(id.is(Kind::kSequence) && id.items.size() >= 5 && id.items[1]->is(Kind::kGlobal) &&
                id.items[2]->is(Kind::kString),
            "a storage is not stored as torch.save does");
    ArchivedTensor tensor{.name = name, .dtype = dtype_of_storage(id.items[1]->text)};
    tensor.shape = integers(*arguments[2]);
    const int64_t bytes = check_dense(tensor, integers(*arguments[3]));
    const auto item_size = static_cast<int64_t>(c10::elementSize(tensor.dtype));
    int64_t begin = 0;
    require(!__builtin_mul_overflow(arguments[1]->integer, item_size, &begin) && begin >= 0,
            "a tensor lies outside of its storage");
    const auto record = "data/" + id.items[2]->text;
    require(begin <= static_cast<int64_t>(reader_.getRecordSize(record)) - bytes,
            "a tensor lies outside of its storage");
    tensor.begin = offset_ + static_cast<int64_t>(reader_.getRecordOffset(record)) + begin;
    require(tensor.begin <= end_ - bytes, "a storage is compressed or cut off");
    found_.push_back(std::move(tensor));
  }

  // The bytes of a tensor that is contiguous.
  static int64_t check_dense(const ArchivedTensor& tensor, const std::vector<int64_t>& strides) {
    require(strides.size() == tensor.shape.size(), "a tensor's strides do not fit its shape");
    int64_t bytes = static_cast<int64_t>(c10::elementSize(tensor.dtype));
    for (const int64_t size : tensor.shape) {
      require(!__builtin_mul_overflow(bytes, size, &bytes), "a shape is impossible");
    }
    const auto dense = contiguous_strides(tensor.shape);
    for (size_t dim = 0; dim < strides.size() && bytes > 0; ++dim) {
      if (tensor.shape[dim] == 1 || strides[dim] == dense[dim]) continue;
      throw std::runtime_error("'" + tensor.name +
                               "' is not contiguous; save it with .contiguous()");
    }
    return bytes;
  }

  const int64_t offset_, end_;
  PyTorchStreamReader reader_;
  std::vector<ArchivedTensor> found_;
  int visited_ = 0;
};

}  // namespace

absl::StatusOr<std::vector<ArchivedTensor>> tensors_of_archive(const InputFile& file,
                                                               int64_t offset, int64_t length) {
  try {
    return Archive(file, offset, length).run(file.path());
  } catch (const std::exception& error) {
    return absl::DataLossError(file.path() +
                               ": not a file of torch.save that can be read: " + error.what());
  }
}

}  // namespace fsdp::internal::checkpoint
