#include "tests/fully_shard/random_programs/side_comparison.h"

#include "tests/support/full_value.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <sstream>

namespace fsdp::testing {

using at::Tensor;

namespace {

constexpr double kRounding = 1e-11, kSmallest = 1e-3;

// Rounding, relative to the largest element.
bool is_close(const Tensor& a, const Tensor& b) {
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  if (!b.isfinite().all().item<bool>()) return a.isfinite().equal(b.isfinite());
  const auto distance = (a - b).abs().max().item<double>();
  return distance <= kRounding * std::max(b.abs().max().item<double>(), kSmallest);
}

std::string label(int id, const char* what) {
  return std::string(what) + " of p" + std::to_string(id);
}

}  // namespace

bool is_same(const Tensor& a, const Tensor& b) {
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  return at::equal(a, b) || ((a == b) | (a.isnan() & b.isnan())).all().item<bool>();
}

void SideComparison::differ(const std::string& what) {
  if (difference_) return;
  difference_ = (place_.empty() ? "" : place_ + ": ") + what;
}

void SideComparison::compare(const std::string& what, const Tensor& found, const Tensor& expected) {
  const bool is_parallel = program_.tensor_ranks > 0;
  const Tensor actual = is_parallel ? full_value(found) : found;
  if (actual.defined() != expected.defined()) {
    return differ(what + (actual.defined() ? " is defined" : " is not defined"));
  }
  if (!actual.defined() || is_same(actual, expected)) return;
  if (is_parallel && is_close(actual, expected)) return;
  std::ostringstream text;
  text << what << " is\n" << actual << "\nbut unsharded\n" << expected;
  differ(text.str());
}

Tensor SideComparison::own_part(int id, const Tensor& whole) const {
  return part_of(whole, *find_param(program_, id), program_, rank_);
}

// Of a sharded tensor's value or gradient: its part here.
void SideComparison::compare_shard(int id, const std::string& what, const Tensor& actual,
                                   const Tensor& expected, const Tensor& bound) {
  if (!actual.defined() || !expected.defined() || program_.tensor_ranks > 0)
    return compare(what, actual, expected);
  if (!is_dtensor(actual)) return differ(what + " is no DTensor");
  const auto local = DTensor(actual).to_local();
  const auto part = own_part(id, expected);
  if (local.sizes() == part.sizes() && local.scalar_type() == part.scalar_type() &&
      bound.defined()) {
    if (((local - part).abs() <= own_part(id, bound)).all().item<bool>()) return;
  }
  compare(what, local, part);
}

// A gradient lies as its parameter.
void SideComparison::check_home(int id, const std::string& what, const Tensor& gradient) {
  const auto entry = sharded_.entry(id);
  if (!gradient.defined() || (!is_dtensor(entry) && !is_dtensor(gradient))) return;
  const bool both = is_dtensor(entry) && is_dtensor(gradient);
  if (!both || DTensor(entry).placements() != DTensor(gradient).placements())
    differ(what + " does not lie as the parameter");
}

void SideComparison::compare_gradients() {
  for (const auto& [id, tensor] : sharded_.model().tensors) {
    const auto what = label(id, "gradient");
    const auto actual = tensor.entry().grad();
    const auto expected = plain_.gradient(id, rank_);
    check_home(id, what, actual);
    if (sharded_.is_sharded(id)) {
      compare_shard(id, what, actual, expected, plain_.bound(id));
    } else {
      compare(what, actual, expected);
    }
  }
}

void SideComparison::compare_parameters(const char* when) {
  at::NoGradGuard no_grad;
  for (const auto& [id, tensor] : sharded_.model().tensors) {
    const auto what = label(id, "value") + " " + when;
    const auto expected = plain_.value(id, rank_);
    if (sharded_.is_sharded(id)) {
      compare_shard(id, what, tensor.entry().detach(), expected, /*bound=*/{});
    } else {
      compare(what, tensor.member, expected);
    }
  }
}

}  // namespace fsdp::testing
