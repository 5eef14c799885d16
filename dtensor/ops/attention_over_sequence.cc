#include "dtensor/ops/attention_over_sequence.h"

#include "device_mesh/on_mesh/mesh_collectives.h"
#include "dtensor/dispatch/cut_indices.h"
#include "dtensor/redistribute/comm_listener.h"
#include "dtensor/redistribute/redistribute.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <limits>
#include <utility>

namespace fsdp::internal {
namespace {

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

struct AttentionOptions {
  bool is_causal;
  std::optional<at::Tensor> mask;  // of this rank's rows
  std::optional<double> scale;
};

// `mask`, of this rank's rows, with what a causal mask leaves out.
at::Tensor with_triangle(const at::Tensor& mask, const DTensorSpec& query, const DTensorSpec& key) {
  const auto keys = key.shape()[kAttentionSequence];
  const at::Tensor rows = elements_of_part(query, kAttentionSequence).unsqueeze(-1);
  const at::Tensor is_later = at::arange(keys, rows.options()).gt(rows);
  return mask.masked_fill(is_later, kMinusInfinity);
}

// The arguments from `at` on: dropout_p, is_causal, attn_mask, scale. A mask has all that
// is not seen.
AttentionOptions options_of(const SequenceCall& of, size_t at) {
  AttentionOptions options{.is_causal = of.call.argument(at + 1).toBool(),
                           .mask = of.call.argument(at + 2).toOptional<at::Tensor>(),
                           .scale = of.call.argument(at + 3).toOptional<double>()};
  if (options.mask && !options.mask->defined()) options.mask.reset();  // absent
  if (options.mask && options.is_causal) {
    options.mask = with_triangle(*options.mask, of.query, of.key);
    options.is_causal = false;
  }
  return options;
}

// Keys and values of positions that stand one behind the other as `runs` say.
struct Keys {
  at::Tensor key, value;
  std::vector<Positions> runs = {};
};

at::Tensor of_groups(const at::Tensor& tensor, const at::Tensor& groups) {
  return groups.defined() ? tensor.index_select(kAttentionHeads, groups) : tensor;
}

// Adds the gradients of `groups` of `sum`, or of all of it.
void add_groups(const at::Tensor& sum, const at::Tensor& groups, const at::Tensor& gradients) {
  if (!groups.defined()) return void(sum.add_(gradients));
  sum.index_add_(kAttentionHeads, groups, gradients.to(sum.scalar_type()));
}

// Of a part without elements there is nothing to compute, which the kernel does not know.
std::vector<Positions> own_runs(const DTensorSpec& query, const at::Tensor& part) {
  if (part.numel() == 0) return {};
  return runs_of_part(query.layout(), kAttentionSequence, query.mesh().coordinate());
}

at::Tensor rows(const at::Tensor& tensor, const Positions& run, int64_t begin, int64_t end) {
  return tensor.narrow(kAttentionSequence, run.at + begin - run.begin, end - begin);
}

// Rows of a mask; all of it where it is the same for every query.
std::optional<at::Tensor> mask_of(const std::optional<at::Tensor>& mask, const Positions& run,
                                  const AttentionBlock& block) {
  if (!mask.has_value() || mask->dim() < 2 || mask->size(-2) == 1) return mask;
  return mask->narrow(-2, run.at + block.query_begin - run.begin,
                      block.query_end - block.query_begin);
}

// Calls `body` with each block that this rank's queries see of `keys`, and the runs that
// it is of.
template <class Body>
void for_each_block(const std::vector<Positions>& queries, const std::vector<Positions>& keys,
                    bool is_causal, const Body& body) {
  for (const Positions& query : queries)
    for (const Positions& key : keys)
      for (const AttentionBlock& block : blocks_of(query, key, is_causal)) body(block, query, key);
}

// The results of a rank's queries over the keys that it has met so far: partial softmaxes
// are joined by the logarithms of their sums (Milakov and Gimelshein, "Online normalizer
// calculation for softmax", 2018).
class Results {
 public:
  explicit Results(const SequenceCall& of)
      : query_(of.call.argument(0).toTensor()),
        groups_(of.groups),
        runs_(own_runs(of.query, query_)),
        options_(options_of(of, 3)) {
    const auto summed = query_.options().dtype(at::toOpMathType(query_.scalar_type()));
    auto shape = query_.sizes().vec();
    shape.back() = of.value.shape().back();
    result_ = at::zeros(shape, summed);
    shape.pop_back();
    logsumexp_ = at::full(shape, kMinusInfinity, summed);
  }

  void meet(const Keys& keys) {
    for_each_block(
        runs_, keys.runs, options_.is_causal,
        [&](const AttentionBlock& block, const Positions& query, const Positions& key) {
          const auto [result, logsumexp] = at::_scaled_dot_product_flash_attention_for_cpu(
              rows(query_, query, block.query_begin, block.query_end),
              of_groups(rows(keys.key, key, block.key_begin, block.key_end), groups_),
              of_groups(rows(keys.value, key, block.key_begin, block.key_end), groups_),
              /*dropout_p=*/0, block.is_triangle, mask_of(options_.mask, query, block),
              options_.scale);
          join(rows(result_, query, block.query_begin, block.query_end),
               rows(logsumexp_, query, block.query_begin, block.query_end), result, logsumexp);
        });
  }

  const AttentionOptions& options() const { return options_; }
  std::vector<c10::IValue> take() {
    return {result_.to(query_.scalar_type()), std::move(logsumexp_)};
  }

 private:
  // Writes `result` and `logsumexp`.
  static void join(const at::Tensor& result, const at::Tensor& logsumexp, const at::Tensor& more,
                   const at::Tensor& more_logsumexp) {
    const at::Tensor all = at::logaddexp(logsumexp, more_logsumexp);
    const auto share = [&](const at::Tensor& part) {
      return part.sub(all).exp_().nan_to_num_(/*nan=*/0).unsqueeze(-1);
    };
    result.mul_(share(logsumexp)).add_(more.mul(share(more_logsumexp)));
    logsumexp.copy_(all);
  }

  at::Tensor query_, groups_;
  std::vector<Positions> runs_;
  AttentionOptions options_;
  at::Tensor result_, logsumexp_;
};

// The same for gradients: each block has those of its share of the softmax, since the
// sums of whole rows are known.
class Gradients {
 public:
  explicit Gradients(const SequenceCall& of)
      : grad_(of.call.argument(0).toTensor()),
        query_(of.call.argument(1).toTensor()),
        result_(of.call.argument(4).toTensor()),
        logsumexp_(of.call.argument(5).toTensor()),
        groups_(of.groups),
        runs_(own_runs(of.query, query_)),
        options_(options_of(of, 6)),
        of_query_(zeros_of(query_)) {}

  // In the type in which gradients are added up.
  static at::Tensor zeros_of(const at::Tensor& tensor) {
    return at::zeros(tensor.sizes(),
                     tensor.options().dtype(at::toOpMathType(tensor.scalar_type())));
  }

  // Adds to `of_keys`, the gradients of `keys`.
  void meet(const Keys& keys, const Keys& of_keys) {
    for_each_block(
        runs_, keys.runs, options_.is_causal,
        [&](const AttentionBlock& block, const Positions& query, const Positions& key) {
          const auto of_rows = [&](const at::Tensor& tensor) {
            return rows(tensor, query, block.query_begin, block.query_end);
          };
          const auto of_columns = [&](const at::Tensor& tensor) {
            return rows(tensor, key, block.key_begin, block.key_end);
          };
          const auto [q, k, v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
              of_rows(grad_), of_rows(query_), of_groups(of_columns(keys.key), groups_),
              of_groups(of_columns(keys.value), groups_), of_rows(result_), of_rows(logsumexp_),
              /*dropout_p=*/0, block.is_triangle, mask_of(options_.mask, query, block),
              options_.scale);
          of_rows(of_query_).add_(q);
          add_groups(of_columns(of_keys.key), groups_, k);
          add_groups(of_columns(of_keys.value), groups_, v);
        });
  }

  const AttentionOptions& options() const { return options_; }
  at::Tensor of_query() const { return of_query_.to(query_.scalar_type()); }

 private:
  at::Tensor grad_, query_, result_, logsumexp_, groups_;
  std::vector<Positions> runs_;
  AttentionOptions options_;
  at::Tensor of_query_;
};

bool cuts_sequence(const DTensorSpec& spec, size_t m) {
  return spec.placements()[m].is_shard(kAttentionSequence) && spec.mesh().shape()[m] > 1;
}

std::vector<Placement> with_sequence(const DTensorSpec& spec, const Placement& placement) {
  auto placements = spec.placements();
  for (size_t m = 0; m < placements.size(); ++m)
    if (cuts_sequence(spec, m)) placements[m] = placement;
  return placements;
}

// All of the sequence. Collective where it is cut.
Keys gathered(const at::Tensor& key, const DTensorSpec& key_spec, const at::Tensor& value,
              const DTensorSpec& value_spec) {
  return {.key = redistribute_local(key, key_spec, with_sequence(key_spec, Replicate{})),
          .value = redistribute_local(value, value_spec, with_sequence(value_spec, Replicate{})),
          .runs = {{.begin = 0, .end = key_spec.shape()[kAttentionSequence]}}};
}

// This rank's part of the sum of what the ranks have for the whole sequence.
at::Tensor scattered(const at::Tensor& terms, const DTensorSpec& spec, at::ScalarType dtype) {
  const auto summed = spec.with_placements(with_sequence(spec, Partial{}));
  return redistribute_local(terms.to(dtype), summed, spec.placements());
}

// Keys and values that go around the ranks of mesh dimension `m`, and what is computed
// with them along with them.
class Ring {
 public:
  Ring(const DTensorSpec& key, const DTensorSpec& value, size_t m)
      : key_(key), value_(value), m_(m), collectives_(collectives_of(key.mesh(), dim())) {}

  int64_t ranks() const { return collectives_.size(); }
  // Of the rank whose keys this one has in step `step`.
  int64_t owner(int64_t step) const { return (collectives_.rank() - step + ranks()) % ranks(); }

  static at::Tensor packed(const at::Tensor& key, const at::Tensor& value) {
    return at::cat({key.flatten(), value.flatten()});
  }
  // Views of what owner `place` has packed.
  Keys unpacked(const at::Tensor& packed, int64_t place) const {
    const auto coordinate = at(place);
    const auto keys = key_.layout().local_shape(coordinate);
    const auto values = value_.layout().local_shape(coordinate);
    const int64_t split = c10::multiply_integers(keys);
    return {.key = packed.narrow(0, 0, split).view(keys),
            .value = packed.narrow(0, split, packed.numel() - split).view(values),
            .runs = runs_of_part(key_.layout(), kAttentionSequence, coordinate)};
  }

  // What this rank had of owner `place` goes to the next rank; `finish` gives what the
  // one before had, of the owner before that.
  std::function<at::Tensor()> pass(const at::Tensor& packed, int64_t place) const {
    const int64_t before = (collectives_.rank() + ranks() - 1) % ranks();
    const int64_t next = (collectives_.rank() + 1) % ranks();
    const int64_t coming =
        elements((place + ranks() - 1) % ranks()) * static_cast<int64_t>(packed.element_size());
    AllToAllOptions options{
        .input = packed.view(at::kByte),
        .input_split_sizes = std::vector<int64_t>(static_cast<size_t>(ranks())),
        .output_split_sizes = std::vector<int64_t>(static_cast<size_t>(ranks())),
        .what = "ring of keys and values along dimension " + std::to_string(m_) + " of " +
                to_string(key_.mesh())};
    options.input_split_sizes[static_cast<size_t>(next)] = static_cast<int64_t>(packed.nbytes());
    options.output_split_sizes[static_cast<size_t>(before)] = coming;
    auto flight = std::make_shared<std::optional<InFlight<std::vector<at::Tensor>>>>();
    issue_comm(
        static_cast<int64_t>(packed.nbytes()), [&] { return event(packed); },
        [&] { flight->emplace(collectives_.start(options)); });
    return [flight, before, packed] {
      return (*flight)->wait()[static_cast<size_t>(before)].view(packed.scalar_type());
    };
  }

 private:
  int64_t dim() const { return static_cast<int64_t>(m_); }
  std::vector<int64_t> at(int64_t place) const {
    auto coordinate = key_.mesh().coordinate();
    coordinate[m_] = place;
    return coordinate;
  }
  int64_t elements(int64_t place) const {
    return c10::multiply_integers(key_.layout().local_shape(at(place))) +
           c10::multiply_integers(value_.layout().local_shape(at(place)));
  }
  CommEvent event(const at::Tensor& packed) const {
    return {.operator_name = CommOperatorScope::current(),
            .cause = CommCause::kExchange,
            .kind = CollectiveKind::kAllToAll,
            .mesh = key_.mesh(),
            .mesh_dim = dim(),
            .from = key_.placements()[m_],
            .to = key_.placements()[m_],
            .shape = packed.sizes().vec(),
            .bytes = static_cast<int64_t>(packed.nbytes())};
  }

  const DTensorSpec& key_;
  const DTensorSpec& value_;
  size_t m_;
  Collectives collectives_;
};

// The mesh dimension along which keys and values go in a ring; none where they are
// gathered, or whole.
std::optional<size_t> ring_of(const SequenceCall& of, const AttentionOptions& options) {
  const auto m = dim_of_sequence(of.key);
  if (!m.has_value()) return std::nullopt;
  const auto plan = attention_plan({.query = of.query.layout(),
                                    .key = of.key.layout(),
                                    .value = of.value.layout(),
                                    .is_causal = options.is_causal,
                                    .has_mask = options.mask.has_value()},
                                   *m, sequence_attention());
  return plan == SequenceAttention::kRing ? m : std::nullopt;
}

void go_around(const Ring& ring, const Keys& own, Results& results) {
  at::Tensor held = Ring::packed(own.key, own.value);
  for (int64_t step = 0; step < ring.ranks(); ++step) {
    const bool is_last = step + 1 == ring.ranks();
    const auto next = is_last ? nullptr : ring.pass(held, ring.owner(step));
    results.meet(ring.unpacked(held, ring.owner(step)));
    if (!is_last) held = next();
  }
}

// Gradients travel behind their keys, and come home with a last step.
at::Tensor go_around(const Ring& ring, const Keys& own, Gradients& gradients) {
  at::Tensor held = Ring::packed(own.key, own.value);
  at::Tensor of_held = Gradients::zeros_of(held);
  for (int64_t step = 0; step < ring.ranks(); ++step) {
    const bool is_last = step + 1 == ring.ranks();
    const int64_t owner = ring.owner(step);
    const auto next = is_last ? nullptr : ring.pass(held, owner);
    gradients.meet(ring.unpacked(held, owner), ring.unpacked(of_held, owner));
    of_held = ring.pass(of_held, owner)().clone();  // what comes may not be written
    if (!is_last) held = next();
  }
  return of_held;
}

}  // namespace

std::optional<size_t> dim_of_sequence(const DTensorSpec& key) {
  std::optional<size_t> dim;
  for (size_t m = 0; m < key.placements().size(); ++m) {
    if (!cuts_sequence(key, m)) continue;
    if (dim.has_value()) return std::nullopt;
    dim = m;
  }
  return dim;
}

std::vector<c10::IValue> attention_over_sequence(const SequenceCall& of) {
  const Keys own{.key = of.call.argument(1).toTensor(), .value = of.call.argument(2).toTensor()};
  Results results(of);
  if (const auto m = ring_of(of, results.options())) {
    go_around(Ring(of.key, of.value, *m), own, results);
  } else {
    results.meet(gathered(own.key, of.key, own.value, of.value));
  }
  return results.take();
}

std::vector<c10::IValue> attention_over_sequence_backward(const SequenceCall& of) {
  const Keys own{.key = of.call.argument(2).toTensor(), .value = of.call.argument(3).toTensor()};
  Gradients gradients(of);
  if (const auto m = ring_of(of, gradients.options())) {
    const Ring ring(of.key, of.value, *m);
    const Keys home = ring.unpacked(go_around(ring, own, gradients), ring.owner(0));
    return {gradients.of_query(), home.key.to(own.key.scalar_type()),
            home.value.to(own.value.scalar_type())};
  }
  const Keys all = gathered(own.key, of.key, own.value, of.value);
  const Keys of_all{.key = Gradients::zeros_of(all.key), .value = Gradients::zeros_of(all.value)};
  gradients.meet(all, of_all);
  return {gradients.of_query(), scattered(of_all.key, of.key, own.key.scalar_type()),
          scattered(of_all.value, of.value, own.value.scalar_type())};
}

}  // namespace fsdp::internal
