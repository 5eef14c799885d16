#include "tests/dtensor/partial_values.h"

#include "dtensor/redistribute/redistribute.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>

#include <random>
#include <utility>

namespace fsdp::testing {
namespace {

// The term that the mesh coordinate `coordinate` contributes; coordinates of dimensions
// that are not Partial count as
// 0.
at::Tensor term(const std::vector<int64_t>& shape, const std::vector<int64_t>& coordinate,
                bool product, uint64_t seed) {
  for (int64_t c : coordinate) seed = seed * 31 + static_cast<uint64_t>(c);
  std::mt19937 random(static_cast<unsigned>(seed));
  at::Tensor values = at::empty(shape, at::kFloat);
  const int64_t count = values.numel();
  auto* const data = values.mutable_data_ptr<float>();
  for (int64_t i = 0; i < count; ++i) {
    data[i] =
        product ? static_cast<float>(random() % 2 + 1) : static_cast<float>(random() % 21) - 10.0F;
  }
  return values;
}

class Terms {
 public:
  Terms(const DeviceMesh& mesh, const std::vector<Placement>& placements,
        std::vector<int64_t> shape, uint64_t seed)
      : mesh_(mesh), placements_(placements), shape_(std::move(shape)), seed_(seed) {}

  at::Tensor own() const {
    auto coordinate = mesh_.coordinate();
    for (size_t m = 0; m < coordinate.size(); ++m) {
      if (!placements_[m].is_partial()) coordinate[m] = 0;
    }
    return term(shape_, coordinate, is_product(), seed_);
  }

  at::Tensor whole(std::vector<int64_t> coordinate = {}) const {
    const size_t m = coordinate.size();
    if (m == placements_.size()) return term(shape_, coordinate, is_product(), seed_);
    const int64_t count = placements_[m].is_partial() ? mesh_.size(static_cast<int64_t>(m)) : 1;
    std::vector<at::Tensor> terms;
    for (int64_t i = 0; i < count; ++i) {
      coordinate.push_back(i);
      terms.push_back(whole(coordinate));
      coordinate.pop_back();
    }
    return placements_[m].is_partial() ? reduced(terms, placements_[m].partial_op()) : terms[0];
  }

 private:
  bool is_product() const {
    for (const auto& placement : placements_) {
      if (placement.is_partial() && placement.partial_op() == Partial::Op::kProduct) return true;
    }
    return false;
  }

  const DeviceMesh& mesh_;
  const std::vector<Placement>& placements_;
  std::vector<int64_t> shape_;
  uint64_t seed_;
};

}  // namespace

at::Tensor reduced(const std::vector<at::Tensor>& terms, Partial::Op op) {
  const at::Tensor all = at::stack(terms);
  switch (op) {
    case Partial::Op::kSum:
      return all.sum(0);
    case Partial::Op::kAvg:
      return all.sum(0).div_(static_cast<int64_t>(terms.size()));
    case Partial::Op::kMin:
      return all.amin(0);
    case Partial::Op::kMax:
      return all.amax(0);
    case Partial::Op::kProduct:
      return all.prod(0);
  }
  return {};
}

KnownDTensor known_dtensor(const DeviceMesh& mesh, const std::vector<Placement>& placements,
                           const std::vector<int64_t>& shape, uint64_t seed) {
  const Terms terms(mesh, placements, shape, seed);
  const at::Tensor whole = terms.whole();
  const internal::DTensorSpec cut{mesh, internal::without_partials(placements), shape,
                                  whole.strides().vec()};
  const at::Tensor local = internal::local_part(terms.own(), cut).clone();
  return {.dtensor = from_local(local, mesh, placements, {.shape = shape}), .whole = whole};
}

std::vector<Placement> every_placement(int64_t ndim) {
  std::vector<Placement> placements{Replicate{}};
  for (int64_t d = 0; d < ndim; ++d) placements.emplace_back(Shard{d});
  for (auto op : {Partial::Op::kSum, Partial::Op::kAvg, Partial::Op::kMin, Partial::Op::kMax,
                  Partial::Op::kProduct}) {
    placements.emplace_back(Partial{op});
  }
  return placements;
}

}  // namespace fsdp::testing
