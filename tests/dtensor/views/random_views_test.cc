// Chains of views that nobody thought of, of DTensors and of plain tensors: the same
// values and gradients bit for bit, data moves only where it must, and writes reach what
// was viewed. FSDP_VIEWS and FSDP_FIRST_SEED in the environment choose how many and
// which.
#include "dtensor/dtensor.h"
#include "dtensor/redistribute/comm_listener.h"
#include "tests/dtensor/views/random_view.h"
#include "tests/support/errors.h"
#include "tests/support/mesh_in_memory.h"
#include "tests/support/number_from_environment.h"
#include "tests/support/thread_ranks.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

namespace fsdp::testing {
namespace {

constexpr uint64_t kShare = 3000, kAll = 10000;
constexpr size_t kFailuresTold = 5;

using Difference = std::optional<std::string>;

// What this rank has of `whole`, by the definition of placements.
at::Tensor part_of(at::Tensor whole, const DeviceMesh& mesh,
                   const std::vector<Placement>& placements) {
  for (size_t m = 0; m < placements.size(); ++m) {
    if (!placements[m].is_shard()) continue;
    const Shard& cut = placements[m].shard();
    const int64_t ranks = mesh.size(static_cast<int64_t>(m)), size = whole.size(cut.dim);
    const int64_t atoms = size / cut.outer / cut.unit, most = (atoms + ranks - 1) / ranks;
    const int64_t begin = std::min(atoms, most * mesh.local_rank(static_cast<int64_t>(m)));
    const int64_t length = std::min(most, atoms - begin);
    Sizes own = whole.sizes().vec();
    own[static_cast<size_t>(cut.dim)] = cut.outer * length * cut.unit;
    whole = whole.unflatten(cut.dim, {cut.outer, atoms, cut.unit})
                .narrow(cut.dim + 1, begin, length)
                .reshape(own);
  }
  return whole;
}

Difference compare(const char* what, const at::Tensor& found, const at::Tensor& wanted) {
  const at::NoGradGuard no_grad;
  if (found.sizes() == wanted.sizes()) {
    const auto& placements = DTensor(found).placements();
    const at::Tensor own = part_of(wanted, DTensor(found).device_mesh(), placements);
    if (DTensor(found).to_local().equal(own)) return std::nullopt;
  }
  std::ostringstream out;
  out << what << " is " << DTensor(found) << "\nbut that of the plain tensor is\n" << wanted;
  return out.str();
}

bool repeats_elements(const at::Tensor& tensor) {
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.stride(d) == 0 && tensor.size(d) > 1) return true;
  }
  return false;
}

// What the views of one rank did.
struct Tally {
  int64_t local_steps = 0, gathered_steps = 0;  // of cut tensors on more than one rank
  int64_t local_views = 0, gathered_views = 0;
  int64_t local_writes = 0, writes_of_gathered = 0;
};

// One random view on this rank.
class ViewOnRank {
 public:
  ViewOnRank(const RandomView& view, const DeviceMesh& mesh, Tally& tally)
      : view_(view), mesh_(mesh), tally_(tally), plain_base_(viewed_tensor(view)) {
    base_ = distribute_tensor(plain_base_, mesh, view.placements);
    base_.requires_grad_();
    plain_base_.requires_grad_();
    plain_ = plain_base_;
    found_ = base_;
  }

  // The first one. Collective.
  Difference difference() {
    for (const ViewStep& step : view_.steps) {
      if (auto different = differs_at(step)) return step.text + ": " + *different;
    }
    count_view();
    if (auto different = differs_in_gradient()) return different;
    return differs_when_written();
  }

 private:
  Difference differs_at(const ViewStep& step) {
    const Sizes shape = found_.sizes().vec();
    const auto before = DTensor(found_).placements();
    int moves = 0;
    {
      const internal::CommListener listener([&](const internal::CommEvent&) { ++moves; });
      found_ = step.apply(found_);
      plain_ = step.apply(plain_);
    }
    if (auto different = compare("the value", found_, plain_)) return different;
    const bool is_gathered = lost_cut(before, DTensor(found_).placements());
    gathered_ |= is_gathered;
    if (c10::multiply_integers(shape) == 0) return std::nullopt;
    const bool must_move = is_gathered && mesh_.ndim() == 1;  // else a group may have nothing
    if (must_move ? moves != 1 : !is_gathered && moves > 0)
      return "moved data " + std::to_string(moves) + " times";
    if (plain_.numel() == 0) return std::nullopt;
    const auto cut = only_cut(before);
    if (!cut) return std::nullopt;
    const bool may_stay = step.stays_local(shape, *cut, mesh_.size());
    (may_stay ? tally_.local_steps : tally_.gathered_steps) += 1;
    if (may_stay == is_gathered)
      return is_gathered ? "was gathered but each rank has its part" : "was not gathered";
    return std::nullopt;
  }

  // Of a tensor on a mesh of one dimension and more than one rank.
  std::optional<Shard> only_cut(const std::vector<Placement>& placements) const {
    if (mesh_.ndim() > 1 || mesh_.size() == 1 || !placements[0].is_shard()) return std::nullopt;
    return placements[0].shard();
  }

  bool lost_cut(const std::vector<Placement>& before, const std::vector<Placement>& after) const {
    for (size_t m = 0; m < before.size(); ++m) {
      if (before[m].is_shard() && !after[m].is_shard() && mesh_.size(static_cast<int64_t>(m)) > 1)
        return true;
    }
    return false;
  }

  void count_view() {
    if (mesh_.size() == 1 || plain_base_.numel() == 0) return;
    (gathered_ ? tally_.gathered_views : tally_.local_views) += 1;
  }

  // Of a linear function with whole numbers, whose sums are exact in any order.
  Difference differs_in_gradient() {
    const at::Tensor weights =
        at::arange(1, plain_.numel() + 1, at::kDouble).mul(37).remainder(101).view(plain_.sizes());
    found_.mul(weights).sum().backward();
    plain_.mul(weights).sum().backward();
    at::Tensor gradient = base_.grad();
    const auto& placements = DTensor(gradient).placements();
    const bool has_terms = std::any_of(placements.begin(), placements.end(),
                                       [](const auto& each) { return each.is_partial(); });
    if (has_terms) gradient = DTensor(gradient).redistribute(view_.placements);
    return compare("the gradient", gradient, plain_base_.grad());
  }

  Difference differs_when_written() {
    if (!plain_.is_alias_of(plain_base_) || repeats_elements(plain_)) return std::nullopt;
    if (plain_.numel() == 0) return std::nullopt;
    const at::NoGradGuard no_grad;
    const auto write = [this](const at::Tensor& view) {
      if (view_.seed % 3 == 0) return view.mul_(3);
      if (view_.seed % 3 == 1) return view.add_(1000);
      return view.copy_(at::arange(view.numel(), at::kDouble).neg().view(view.sizes()));
    };
    (gathered_ ? tally_.writes_of_gathered : tally_.local_writes) += 1;
    write(found_);
    write(plain_);
    if (auto different = compare("what was viewed, after the write,", base_, plain_base_))
      return different;
    return compare("the view, after it was written,", found_, plain_);
  }

  const RandomView& view_;
  const DeviceMesh& mesh_;
  Tally& tally_;
  at::Tensor plain_base_, base_;
  at::Tensor plain_, found_;  // the views so far
  bool gathered_ = false;
};

class Failures {
 public:
  void add(const RandomView& view, int64_t rank, const std::string& text) {
    const std::lock_guard lock(mutex_);
    if (++count_ <= kFailuresTold)
      told_ += to_string(view) + "; rank " + std::to_string(rank) + ": " + text + "\n";
  }
  void expect_none() const { EXPECT_EQ(count_, 0u) << told_; }

 private:
  std::mutex mutex_;
  size_t count_ = 0;
  std::string told_;
};

// What rank 0 counted.
Tally run_views(const std::vector<RandomView>& views, Failures& failures) {
  Tally tally;
  const MeshInMemory memory(views.front().mesh);
  run_ranks(memory.size(), [&](int64_t rank) {
    const DeviceMesh mesh = memory.join();
    Tally own;
    for (const RandomView& view : views) {
      try {
        const auto different = ViewOnRank(view, mesh, own).difference();
        if (different) failures.add(view, rank, *different);
      } catch (const std::exception& error) {
        failures.add(view, rank, text_of(error));
        return;  // the other ranks fail alike, or because this one is gone
      }
    }
    if (rank == 0) tally = own;
  });
  return tally;
}

// Each of two things that can happen does in a tenth of the cases and more.
void expect_both(const char* what, int64_t one, int64_t other) {
  std::printf("%s: %lld and %lld\n", what, static_cast<long long>(one),
              static_cast<long long>(other));
  EXPECT_GE(std::min(one, other) * 10, one + other) << what;
}

TEST(RandomViews, OfDTensorsAreThoseOfPlainTensors) {
  const auto first = number_from_environment("FSDP_FIRST_SEED", 1);
  const auto count = number_of_cases("FSDP_VIEWS", kShare, kAll);
  std::map<Sizes, std::vector<RandomView>> by_mesh;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    RandomView view = draw_view(seed);
    by_mesh[view.mesh].push_back(std::move(view));
  }
  Failures failures;
  Tally all;
  for (const auto& [mesh, views] : by_mesh) {
    const Tally tally = run_views(views, failures);
    all.local_steps += tally.local_steps;
    all.gathered_steps += tally.gathered_steps;
    all.local_views += tally.local_views;
    all.gathered_views += tally.gathered_views;
    all.local_writes += tally.local_writes;
    all.writes_of_gathered += tally.writes_of_gathered;
  }
  failures.expect_none();
  if (count < 500) return;
  expect_both("steps that stay local, and that gather", all.local_steps, all.gathered_steps);
  expect_both("views that stay local, and that gather", all.local_views, all.gathered_views);
  expect_both("writes of views that stay local, and of gathered ones", all.local_writes,
              all.writes_of_gathered);
}

}  // namespace
}  // namespace fsdp::testing
