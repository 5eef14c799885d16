#include "tests/dtensor/views/view_step.h"

#include "tests/dtensor/views/local_views.h"

#include <ATen/ATen.h>
#include <ATen/TensorUtils.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <sstream>
#include <utility>

namespace fsdp::testing {
namespace {

using StaysLocal = decltype(ViewStep::stays_local);

template <class... Arguments>
std::string call(const char* name, const Arguments&... arguments) {
  std::ostringstream out;
  const char* separator = "(";
  out << name;
  ((out << separator << arguments, separator = ", "), ...);
  out << ")";
  return out.str();
}

bool always(const Sizes&, const Shard&, int64_t) { return true; }

StaysLocal unless_cut(int64_t dim) {
  return [dim](const Sizes&, const Shard& cut, int64_t) { return cut.dim != dim; };
}

StaysLocal if_some_cut_keeps(Sizes after) {
  return [after = std::move(after)](const Sizes& before, const Shard& cut, int64_t ranks) {
    return some_cut_keeps(before, cut, after, ranks);
  };
}

StaysLocal if_whole_blocks(int64_t dim, int64_t start, int64_t length) {
  return [=](const Sizes& shape, const Shard& cut, int64_t) {
    return cut.dim != dim || are_whole_blocks(cut, shape[static_cast<size_t>(dim)], start, length);
  };
}

class StepDrawing {
 public:
  StepDrawing(Draws& draws, const at::Tensor& plain)
      : draws_(draws), plain_(plain), ndim_(plain.dim()) {}

  ViewStep run() {
    for (;;) {
      if (auto step = draw()) return std::move(*step);
    }
  }

 private:
  using Drawn = std::optional<ViewStep>;

  Drawn draw() {
    switch (draws_.between(0, 14)) {
      case 0:
      case 1:
      case 2:
        return view();
      case 3:
        return reshape();
      case 4:
        return flatten();
      case 5:
        return unflatten();
      case 6:
        return transpose();
      case 7:
        return permute();
      case 8:
        return slice();
      case 9:
        return select();
      case 10:
        return split();
      case 11:
        return chunk();
      case 12:
        return expand();
      case 13:
        return squeeze();
      default:
        return unsqueeze();
    }
  }

  int64_t any_dim() { return draws_.between(0, static_cast<int>(ndim_) - 1); }
  // The same dimension, sometimes counted from the end.
  int64_t counted(int64_t dim, int64_t ndim) { return draws_.chance(30) ? dim - ndim : dim; }

  // Dimensions next to each other merged, some split: mostly what models do.
  Sizes regrouped() {
    Sizes sizes = plain_.sizes().vec();
    for (int changes = draws_.between(1, 3); changes > 0; --changes) {
      const bool merges = sizes.size() > 1 && draws_.chance(50);
      if (merges) {
        const auto at = sizes.begin() + draws_.between(0, static_cast<int>(sizes.size()) - 2);
        at[1] *= at[0];
        sizes.erase(at);
      } else if (sizes.empty()) {
        sizes.push_back(1);
      } else if (static_cast<int64_t>(sizes.size()) < kMostDims) {
        const auto at = sizes.begin() + draws_.between(0, static_cast<int>(sizes.size()) - 1);
        const int64_t part = draw_divisor(draws_, *at);
        *at /= part;
        sizes.insert(at, part);
      }
    }
    return sizes;
  }

  // Any shape of as many elements.
  Sizes factors() {
    Sizes sizes;
    int64_t left = plain_.numel();
    for (int more = draws_.between(0, 3); more > 0; --more) {
      sizes.push_back(draw_divisor(draws_, left));
      left /= sizes.back();
    }
    sizes.push_back(left);
    return sizes;
  }

  Sizes new_sizes() { return plain_.numel() > 0 && draws_.chance(30) ? factors() : regrouped(); }

  Drawn view() {
    const Sizes after = new_sizes();
    if (!at::detail::computeStride(plain_.sizes(), plain_.strides(), at::IntArrayRef(after)))
      return std::nullopt;
    Sizes given = after;
    if (plain_.numel() > 0 && !given.empty() && draws_.chance(25))
      given[static_cast<size_t>(draws_.number(given.size()))] = -1;
    return ViewStep{call("view", at::IntArrayRef(given)),
                    [given](const at::Tensor& t) { return t.view(given); },
                    if_some_cut_keeps(after)};
  }

  Drawn reshape() {
    const Sizes after = new_sizes();
    return ViewStep{call("reshape", at::IntArrayRef(after)),
                    [after](const at::Tensor& t) { return t.reshape(after); },
                    if_some_cut_keeps(after)};
  }

  Drawn flatten() {
    if (ndim_ == 0) return std::nullopt;
    const int64_t start = any_dim();
    const int64_t end = draws_.between(static_cast<int>(start), static_cast<int>(ndim_) - 1);
    return ViewStep{call("flatten", start, end),
                    [=](const at::Tensor& t) { return t.flatten(start, end); },
                    if_some_cut_keeps(plain_.flatten(start, end).sizes().vec())};
  }

  Drawn unflatten() {
    if (ndim_ == 0 || ndim_ == kMostDims) return std::nullopt;
    const int64_t dim = any_dim(), part = draw_divisor(draws_, plain_.size(dim));
    const Sizes parts{part, plain_.size(dim) / part};
    const int64_t given = counted(dim, ndim_);
    return ViewStep{call("unflatten", given, at::IntArrayRef(parts)),
                    [=](const at::Tensor& t) { return t.unflatten(given, parts); },
                    if_some_cut_keeps(plain_.unflatten(dim, parts).sizes().vec())};
  }

  Drawn transpose() {
    if (ndim_ == 0) return std::nullopt;
    if (ndim_ == 2 && draws_.chance(50))
      return ViewStep{"t()", [](const at::Tensor& t) { return t.t(); }, always};
    const int64_t a = counted(any_dim(), ndim_), b = counted(any_dim(), ndim_);
    return ViewStep{call("transpose", a, b), [=](const at::Tensor& t) { return t.transpose(a, b); },
                    always};
  }

  Drawn permute() {
    const Sizes order = draws_.permutation(ndim_);
    return ViewStep{call("permute", at::IntArrayRef(order)),
                    [order](const at::Tensor& t) { return t.permute(order); }, always};
  }

  Drawn slice() {
    if (ndim_ == 0) return std::nullopt;
    const int64_t dim = any_dim();
    const auto size = static_cast<int>(plain_.size(dim));
    const int64_t start = draws_.between(0, size), end = draws_.between(0, size);
    const int64_t step = draws_.pick({1, 1, 1, 2, 3});
    if (end < start) return std::nullopt;
    const int64_t length = plain_.slice(dim, start, end, step).size(dim);
    return ViewStep{
        call("slice", dim, start, end, step),
        [=](const at::Tensor& t) { return t.slice(dim, start, end, step); },
        step == 1 || length == size ? if_whole_blocks(dim, start, length) : unless_cut(dim)};
  }

  Drawn select() {
    if (ndim_ == 0) return std::nullopt;
    const int64_t dim = any_dim();
    if (plain_.size(dim) == 0) return std::nullopt;
    const int64_t index =
        counted(draws_.between(0, static_cast<int>(plain_.size(dim)) - 1), plain_.size(dim));
    return ViewStep{call("select", dim, index),
                    [=](const at::Tensor& t) { return t.select(dim, index); }, unless_cut(dim)};
  }

  // One of the parts; all are made at once.
  Drawn split() {
    if (ndim_ == 0) return std::nullopt;
    const int64_t dim = any_dim(), size = plain_.size(dim);
    if (size == 0) return std::nullopt;
    const int64_t length =
        draws_.chance(50) ? draw_divisor(draws_, size) : draws_.between(1, static_cast<int>(size));
    const auto which = static_cast<size_t>(draws_.number((size + length - 1) / length));
    return ViewStep{call("split", length, dim) + "[" + std::to_string(which) + "]",
                    [=](const at::Tensor& t) { return t.split(length, dim)[which]; },
                    if_parts_are_whole_blocks(dim, length)};
  }

  Drawn chunk() {
    if (ndim_ == 0) return std::nullopt;
    const int64_t dim = any_dim(), size = plain_.size(dim);
    if (size == 0) return std::nullopt;
    const int64_t chunks = draws_.between(1, 4), length = (size + chunks - 1) / chunks;
    const auto which = static_cast<size_t>(draws_.number((size + length - 1) / length));
    return ViewStep{call("chunk", chunks, dim) + "[" + std::to_string(which) + "]",
                    [=](const at::Tensor& t) { return t.chunk(chunks, dim)[which]; },
                    if_parts_are_whole_blocks(dim, length)};
  }

  static StaysLocal if_parts_are_whole_blocks(int64_t dim, int64_t length) {
    return [=](const Sizes& shape, const Shard& cut, int64_t) {
      const int64_t size = shape[static_cast<size_t>(dim)];
      for (int64_t start = 0; cut.dim == dim && start < size; start += length) {
        if (!are_whole_blocks(cut, size, start, std::min(length, size - start))) return false;
      }
      return true;
    };
  }

  Drawn expand() {
    Sizes after = plain_.sizes().vec();
    std::vector<int64_t> expanded;
    for (int64_t d = 0; d < ndim_; ++d) {
      if (after[static_cast<size_t>(d)] != 1 || draws_.chance(40)) continue;
      after[static_cast<size_t>(d)] = draws_.between(0, 3);
      if (after[static_cast<size_t>(d)] != 1) expanded.push_back(d);
    }
    if (ndim_ < kMostDims && draws_.chance(40)) after.insert(after.begin(), draws_.between(1, 3));
    if (c10::multiply_integers(after) > kMostElements) return std::nullopt;
    Sizes given = after;
    const auto added = after.size() - static_cast<size_t>(ndim_);
    for (size_t d = added; d < given.size(); ++d) {
      if (plain_.size(static_cast<int64_t>(d - added)) == given[d] && draws_.chance(30))
        given[d] = -1;
    }
    return ViewStep{call("expand", at::IntArrayRef(given)),
                    [given](const at::Tensor& t) { return t.expand(given); },
                    [expanded](const Sizes&, const Shard& cut, int64_t) {
                      return std::count(expanded.begin(), expanded.end(), cut.dim) == 0;
                    }};
  }

  Drawn squeeze() {
    const auto is_one = [](const Sizes& shape, int64_t dim) {
      return shape[static_cast<size_t>(dim)] == 1;
    };
    if (ndim_ == 0 || draws_.chance(40)) {
      return ViewStep{
          "squeeze()", [](const at::Tensor& t) { return t.squeeze(); },
          [=](const Sizes& shape, const Shard& cut, int64_t) { return !is_one(shape, cut.dim); }};
    }
    const int64_t dim = any_dim(), given = counted(dim, ndim_);
    return ViewStep{call("squeeze", given), [=](const at::Tensor& t) { return t.squeeze(given); },
                    [=](const Sizes& shape, const Shard& cut, int64_t) {
                      return cut.dim != dim || !is_one(shape, dim);
                    }};
  }

  Drawn unsqueeze() {
    if (ndim_ == kMostDims) return std::nullopt;
    const int64_t dim = counted(draws_.between(0, static_cast<int>(ndim_)), ndim_ + 1);
    return ViewStep{call("unsqueeze", dim), [=](const at::Tensor& t) { return t.unsqueeze(dim); },
                    always};
  }

  Draws& draws_;
  const at::Tensor& plain_;
  int64_t ndim_;
};

}  // namespace

int64_t draw_divisor(Draws& draws, int64_t number) {
  Sizes divisors{1};
  for (int64_t d = 2; d <= number; ++d) {
    if (number % d == 0) divisors.push_back(d);
  }
  return draws.pick(divisors);
}

ViewStep draw_step(Draws& draws, const at::Tensor& plain) {
  return StepDrawing(draws, plain).run();
}

}  // namespace fsdp::testing
