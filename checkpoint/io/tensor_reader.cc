#include "checkpoint/io/tensor_reader.h"

#include "checkpoint/io/misfits.h"
#include "checkpoint/ranks/tensor_values.h"
#include "dtensor/dtensor.h"
#include "dtensor/tensor/dtensor_impl.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <exception>
#include <future>
#include <utility>

namespace fsdp::internal::checkpoint {
namespace {

constexpr int64_t kWorthAThread = int64_t{4} << 20;

std::vector<LocalBox> boxes_of(const at::Tensor& tensor) {
  if (is_dtensor(tensor)) return spec_of(tensor).local_boxes();
  return {{whole_box(tensor.sizes().vec()), std::vector<int64_t>(tensor.dim(), 0)}};
}

// The whole of this rank's part.
Box part_of(const at::Tensor& tensor) {
  return whole_box(is_dtensor(tensor) ? spec_of(tensor).local_shape() : tensor.sizes().vec());
}

at::Tensor view_of_box(at::Tensor tensor, const Box& box) {
  for (size_t dim = 0; dim < box.size(); ++dim)
    tensor = tensor.narrow(static_cast<int64_t>(dim), box[dim].offset, box[dim].length);
  return tensor;
}

// What leads from places in the tensor to places in the part.
std::vector<int64_t> way_into_part(const LocalBox& box) {
  std::vector<int64_t> way = box.begin;
  for (size_t dim = 0; dim < way.size(); ++dim) way[dim] -= box.box[dim].offset;
  return way;
}

// A tensor that has more rows (indices of its first dimension) than the file has of it,
// such as the table of a vocabulary that was enlarged: which of this rank's boxes the
// file fills, and which rows are new.

bool has_more_rows(const at::Tensor& tensor, const std::vector<int64_t>& shape) {
  const auto sizes = tensor.sizes();
  return !shape.empty() && sizes.size() == shape.size() && sizes.front() > shape.front() &&
         sizes.slice(1) == c10::IntArrayRef(shape).slice(1);
}

// How many of a box's rows the file has.
int64_t old_rows_of(const LocalBox& box, int64_t rows) {
  const auto& [offset, length] = box.box.front();
  return std::clamp<int64_t>(rows - offset, 0, length);
}

// What the file's `rows` rows are of `boxes`.
std::vector<LocalBox> old_boxes(std::vector<LocalBox> boxes, int64_t rows) {
  for (auto& box : boxes) box.box.front().length = old_rows_of(box, rows);
  return boxes;
}

// The others; none where this rank has none of them.
std::vector<NewRows> new_rows(const std::vector<LocalBox>& boxes, int64_t rows) {
  std::vector<NewRows> found;
  for (const auto& box : boxes) {
    const auto old = old_rows_of(box, rows);
    NewRows rest{.first = box.box.front().offset + old,
                 .place = box_at(box.begin, lengths_of(box.box))};
    rest.place.front().offset += old;
    rest.place.front().length -= old;
    if (numel_of(rest.place) > 0) found.push_back(std::move(rest));
  }
  return found;
}

constexpr int64_t kBytesAtOnce = int64_t{64} << 20;

// From the first element to behind the last. REQUIRES: there is one.
int64_t extent_of(c10::IntArrayRef shape, const std::vector<int64_t>& strides) {
  int64_t extent = 1;
  for (size_t dim = 0; dim < shape.size(); ++dim) extent += (shape[dim] - 1) * strides[dim];
  return extent;
}

// A tensor of a file that does not lie there in row-major order, or whose values are to
// be conjugated or negated: channels last, transposed, expanded, a slice of another.
class StridedElements {
 public:
  // `elements.strides` are as many as the tensor has dimensions. `file` outlives it.
  StridedElements(const VerifiedFile& file, StoredElements elements, c10::ScalarType dtype)
      : file_(file), elements_(std::move(elements)), dtype_(dtype) {}

  // Fills `target`, of any device, dtype and strides, with the box of its shape that
  // begins at `from`. Reads what lies between the box's first and last element, 64 MiB at
  // a time, or as much as one index of the dimension with the largest stride spans.
  absl::Status read(const std::vector<int64_t>& from, const at::Tensor& target,
                    BlockBuffer& buffer) const {
    if (target.numel() == 0) return absl::OkStatus();
    const auto& strides = elements_.strides;
    int64_t first = 0;
    for (size_t dim = 0; dim < from.size(); ++dim) first += from[dim] * strides[dim];
    const auto bytes = static_cast<int64_t>(c10::elementSize(dtype_));
    const int64_t extent = extent_of(target.sizes(), strides) * bytes;
    if (extent <= kBytesAtOnce) return read_at_once(first, target, buffer);
    const int64_t dim = std::max_element(strides.begin(), strides.end()) - strides.begin();
    const int64_t stride = strides[static_cast<size_t>(dim)];
    const int64_t step = std::max<int64_t>(1, kBytesAtOnce / std::max<int64_t>(1, stride * bytes));
    for (int64_t begin = 0; begin < target.size(dim); begin += step) {
      const int64_t length = std::min(step, target.size(dim) - begin);
      const auto read =
          read_at_once(first + begin * stride, target.narrow(dim, begin, length), buffer);
      if (!read.ok()) return read;
    }
    return absl::OkStatus();
  }

 private:
  absl::Status read_at_once(int64_t first, const at::Tensor& target, BlockBuffer& buffer) const {
    const at::Tensor memory =
        at::empty({extent_of(target.sizes(), elements_.strides)}, at::TensorOptions(dtype_));
    const auto bytes = static_cast<int64_t>(c10::elementSize(dtype_));
    const auto read = file_.read(memory.mutable_data_ptr(), static_cast<int64_t>(memory.nbytes()),
                                 elements_.begin + first * bytes, buffer);
    if (!read.ok()) return read;
    at::Tensor values = memory.as_strided(target.sizes(), elements_.strides);
    if (elements_.conj) values = values.conj();
    if (elements_.neg) values = values._neg_view();
    target.copy_(values);
    return absl::OkStatus();
  }

  const VerifiedFile& file_;
  const StoredElements elements_;
  const c10::ScalarType dtype_;
};

}  // namespace

absl::StatusOr<VerifiedFile*> TensorReader::open(size_t file) {
  if (const auto known = open_.find(file); known != open_.end()) return &known->second;
  auto opened = VerifiedFile::open(catalog_.files[file], rules_.verify);
  if (!opened.ok()) return opened.status();
  return &open_.emplace(file, *std::move(opened)).first->second;
}

absl::Status TensorReader::add_pieces(const std::string& stored_name, const StoredTensor& stored,
                                      const LocalBox& box, Target& target) {
  const auto way = way_into_part(box);
  int64_t covered = 0;
  for (const StoredBox& saved : stored.boxes) {
    const Box common = intersect(saved.box, box.box);
    if (numel_of(common) == 0) continue;
    const Box in_part = shifted(common, way);
    auto file = open(saved.file);
    if (!file.ok()) return file.status();
    auto elements = (*file)->find(stored_name, saved, stored.dtype);
    if (!elements.ok()) return elements.status();
    covered += numel_of(common);
    target.is_plain &= elements->are_plain();
    target.pieces.push_back({saved.file, *std::move(elements), shifted(saved.box, way), in_part});
  }
  if (covered >= numel_of(box.box)) return absl::OkStatus();
  return absl::DataLossError("'" + stored_name + "' " + to_string(box.box) + ": only " +
                             std::to_string(covered) + " of its " +
                             std::to_string(numel_of(box.box)) +
                             " elements are in the files: some are missing");
}

absl::Status TensorReader::check_no_overlap(const std::string& stored_name,
                                            const Target& target) const {
  std::vector<Box> boxes;
  for (const Piece& piece : target.pieces) boxes.push_back(piece.common);
  const auto overlap = find_overlap(boxes);
  if (!overlap) return absl::OkStatus();
  const Piece &one = target.pieces[overlap->first], &other = target.pieces[overlap->second];
  return absl::DataLossError("'" + stored_name + "' " + to_string(one.common) +
                             " is in two files: " + catalog_.files[one.file].path + " and " +
                             catalog_.files[other.file].path);
}

absl::Status TensorReader::find_pieces(const std::string& stored_name, const StoredTensor& stored,
                                       const std::vector<LocalBox>& boxes, Target& target) {
  for (const LocalBox& box : boxes) {
    if (auto added = add_pieces(stored_name, stored, box, target); !added.ok()) return added;
  }
  if (auto once = check_no_overlap(stored_name, target); !once.ok()) return once;
  std::sort(target.pieces.begin(), target.pieces.end(), [](const Piece& a, const Piece& b) {
    return std::pair(a.file, a.elements.begin) < std::pair(b.file, b.elements.begin);
  });
  return absl::OkStatus();
}

absl::Status TensorReader::plan(const std::string& stored_name, const std::string& name,
                                const at::Tensor& target) {
  const StoredTensor& stored = catalog_.tensors.at(stored_name);
  const bool grows = rules_.init_new_rows && has_more_rows(target, stored.shape);
  const Offered offered{stored.dtype, grows ? target.sizes() : c10::IntArrayRef(stored.shape),
                        "in the file", "LoadOptions::cast allows it", stored.codec};
  if (auto fits = check_fits(name, target, offered, rules_.cast); !fits.ok()) return fits;
  Target planned{
      .tensor = target, .stored_dtype = stored.dtype, .part = part_of(target), .name = name};
  auto boxes = boxes_of(target);
  if (grows) {
    planned.new_rows = new_rows(boxes, stored.shape.front());
    planned.is_plain = false;  // of what this rank holds the file has a part
    boxes = old_boxes(std::move(boxes), stored.shape.front());
  }
  auto found = find_pieces(stored_name, stored, boxes, planned);
  if (!found.ok()) return found;
  targets_.push_back(std::move(planned));
  return absl::OkStatus();
}

absl::StatusOr<at::Tensor> TensorReader::plan_whole(const std::string& stored_name) {
  const StoredTensor& stored = catalog_.tensors.at(stored_name);
  const Box whole = whole_box(stored.shape);
  Target planned{.tensor = {}, .stored_dtype = stored.dtype, .part = whole};
  const LocalBox all{whole, std::vector<int64_t>(stored.shape.size(), 0)};
  if (auto found = find_pieces(stored_name, stored, {all}, planned); !found.ok()) return found;
  try {
    planned.tensor = at::empty(stored.shape, at::TensorOptions(stored.dtype));
  } catch (const std::exception&) {
    const auto bytes = static_cast<int64_t>(c10::elementSize(stored.dtype)) * numel_of(whole);
    return absl::ResourceExhaustedError("'" + stored_name + "' " + to_string(whole) + " takes " +
                                        std::to_string(bytes) + " bytes, which cannot be had");
  }
  targets_.push_back(planned);
  return planned.tensor;
}

TensorReader::Destination TensorReader::destination(const Target& target,
                                                    const at::Tensor& memory) {
  return {&target, static_cast<char*>(memory.mutable_data_ptr()),
          static_cast<int64_t>(memory.nbytes())};
}

absl::Status TensorReader::read_part(const Destination& destination, int64_t from, int64_t to,
                                     BlockBuffer& buffer) const {
  const Target& target = *destination.target;
  const auto item_size = static_cast<int64_t>(c10::elementSize(target.stored_dtype));
  int64_t done = 0;
  absl::Status status;
  for (const Piece& piece : target.pieces) {
    const VerifiedFile& file = open_.at(piece.file);
    for_each_run(piece.common, piece.saved, target.part, [&](const Run& run) {
      const int64_t length = run.length * item_size;
      const int64_t begin = std::max<int64_t>(from - done, 0);
      const int64_t end = std::min(to - done, length);
      done += length;
      if (!status.ok() || begin >= end) return;
      status = file.read(destination.memory + run.to * item_size + begin, end - begin,
                         piece.elements.begin + run.from * item_size + begin, buffer);
    });
  }
  return status;
}

absl::Status TensorReader::read_range(const std::vector<Destination>& destinations, int64_t from,
                                      int64_t to, BlockBuffer& buffer) const {
  for (const Destination& each : destinations) {
    if (from < each.bytes && to > 0) {
      if (auto read = read_part(each, from, to, buffer); !read.ok()) return read;
    }
    from -= each.bytes, to -= each.bytes;
  }
  return absl::OkStatus();
}

absl::Status TensorReader::read_all(const std::vector<Destination>& destinations) {
  int64_t bytes = 0;
  for (const Destination& each : destinations) bytes += each.bytes;
  const int64_t half = bytes < kWorthAThread ? bytes : bytes / 2;
  const auto policy = half < bytes ? std::launch::async : std::launch::deferred;
  auto other =
      std::async(policy, [&] { return read_range(destinations, half, bytes, other_buffer_); });
  absl::Status status = read_range(destinations, 0, half, buffer_);
  const absl::Status other_status = other.get();
  return status.ok() ? other_status : status;
}

bool TensorReader::takes_bytes_directly(const Target& target, const at::Tensor& local) {
  return target.is_plain && local.device().is_cpu() && local.is_contiguous() && !local.is_conj() &&
         !local.is_neg() && local.scalar_type() == target.stored_dtype;
}

absl::Status TensorReader::read_converted(const Target& target, const at::Tensor& local) {
  const at::Tensor bytes =
      at::empty(lengths_of(target.part), at::TensorOptions(target.stored_dtype));
  if (auto read = read_all({destination(target, bytes)}); !read.ok()) return read;
  local.copy_(bytes);
  return absl::OkStatus();
}

absl::Status TensorReader::read_by_strides(const Target& target, const at::Tensor& local) {
  for (const Piece& piece : target.pieces) {
    const at::Tensor place = view_of_box(local, piece.common);
    std::vector<int64_t> from = offsets_of(piece.common);
    for (size_t dim = 0; dim < from.size(); ++dim) from[dim] -= piece.saved[dim].offset;
    StoredElements elements = piece.elements;
    if (elements.strides.empty()) elements.strides = contiguous_strides(lengths_of(piece.saved));
    const StridedElements source{open_.at(piece.file), std::move(elements), target.stored_dtype};
    if (auto read = source.read(from, place, buffer_); !read.ok()) return read;
  }
  return absl::OkStatus();
}

void TensorReader::init_new_rows(const Target& target) const {
  for (const auto& [first, place] : target.new_rows)
    rules_.init_new_rows(target.name, first, view_of_box(target.local, place));
}

// All ranks open what they write in one order, so that they come to each unit together.
void TensorReader::open_all() {
  for (Target& target : targets_) target.local = open_for_writing(target.tensor);
  std::stable_sort(targets_.begin(), targets_.end(), [](const Target& a, const Target& b) {
    const auto first = [](const Target& target) {
      return target.pieces.empty()
                 ? std::pair<size_t, int64_t>()
                 : std::pair(target.pieces.front().file, target.pieces.front().elements.begin);
    };
    return first(a) < first(b);
  });
}

absl::Status TensorReader::read() {
  const c10::NoGradGuard no_grad;
  open_all();
  std::vector<Destination> direct;
  for (const Target& target : targets_) {
    if (target.local.numel() == 0 || !takes_bytes_directly(target, target.local)) continue;
    direct.push_back(destination(target, target.local));
    target.local.unsafeGetTensorImpl()->bump_version();
  }
  if (auto read = read_all(direct); !read.ok()) return read;
  for (const Target& target : targets_) {
    if (target.local.numel() == 0 || takes_bytes_directly(target, target.local)) continue;
    auto read = target.is_plain ? read_converted(target, target.local)
                                : read_by_strides(target, target.local);
    if (!read.ok()) return read;
    init_new_rows(target);
  }
  for (const Target& target : targets_) close_after_writing(target.tensor);
  return absl::OkStatus();
}

}  // namespace fsdp::internal::checkpoint
