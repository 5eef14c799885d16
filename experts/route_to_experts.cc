#include "experts/route_to_experts.h"

#include "device_mesh/collectives/collectives.h"
#include "device_mesh/on_mesh/claims.h"
#include "device_mesh/on_mesh/mesh_collectives.h"
#include "dtensor/dtensor.h"
#include "dtensor/layout/shard_layout.h"
#include "on_demand/gate_arguments.h"

#include <ATen/ops/argsort.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

namespace fsdp {
namespace {

using internal::Chunk;

int64_t sum_of(const std::vector<int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), int64_t{0});
}

std::string where_is(const DeviceMesh& mesh) { return c10::str(" (rank ", mesh.rank(), ")"); }

void check_mesh(const char* call, const DeviceMesh& mesh) {
  TORCH_CHECK_VALUE(mesh.ndim() == 1, call, ": 'mesh' has ", mesh.ndim(),
                    " dimensions, expected 1: take a slice, mesh[\"ep\"]", where_is(mesh));
}

// int64 [ranks, n]: the `numbers` of each rank, [n], which travel with what it claims.
// Collective over the mesh; throws on all ranks alike, as Claims do.
at::Tensor numbers_of_all(const char* call, const internal::Claims& claims,
                          const at::Tensor& numbers, const DeviceMesh& mesh, const char* what,
                          const char* remedy) {
  const at::Tensor words = claims.words();
  const auto rows =
      internal::collectives_of(mesh, 0)
          .rows_of_ranks(
              {.row = at::cat({words, numbers}).to(local_device(mesh)), .what = what, .call = call})
          .cpu();
  claims.check_words(rows.slice(1, 0, words.numel()), mesh, remedy);
  return rows.slice(1, words.numel());
}

std::vector<int64_t> times(std::vector<int64_t> sizes, int64_t factor) {
  for (auto& size : sizes) size *= factor;
  return sizes;
}

// Outside of autograd.
at::Tensor exchanged(const at::Tensor& rows, const std::vector<int64_t>& to,
                     const std::vector<int64_t>& from, const DeviceMesh& mesh) {
  auto shape = rows.sizes().vec();
  shape[0] = sum_of(from);
  const at::Tensor received = at::empty(shape, rows.options());
  if (mesh.size() == 1) return received.copy_(rows);
  const auto row_bytes = rows.element_size() * c10::multiply_integers(rows.sizes().slice(1));
  const at::Tensor sent = rows.contiguous();
  const auto parts = internal::collectives_of(mesh, 0)
                         .start({.input = sent.flatten().view(at::kByte),
                                 .input_split_sizes = times(to, static_cast<int64_t>(row_bytes)),
                                 .output_split_sizes = times(from, static_cast<int64_t>(row_bytes)),
                                 .what = "all_to_all of rows"})
                         .wait();
  if (received.numel() > 0) received.flatten().view(at::kByte).copy_(at::cat(parts));
  return received;
}

class AllToAll : public torch::autograd::Function<AllToAll> {
 public:
  struct Sizes final : torch::CustomClassHolder {
    Sizes(std::vector<int64_t> to_ranks, std::vector<int64_t> from_ranks, DeviceMesh on)
        : to(std::move(to_ranks)), from(std::move(from_ranks)), mesh(std::move(on)) {}
    std::vector<int64_t> to, from;
    DeviceMesh mesh;
  };

  // `before` is an exchange that comes before this one, and after it in the backward,
  // also on a rank where nothing that this one sends was made of what came by that one.
  // It requires a gradient, so that every rank has a backward. Gives the rows that come,
  // and what the next exchange takes as `before`.
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context,
                                                const at::Tensor& rows, const at::Tensor& before,
                                                const c10::intrusive_ptr<Sizes>& sizes) {
    context->saved_data["sizes"] = c10::IValue::make_capsule(sizes);
    return {exchanged(rows, sizes->to, sizes->from, sizes->mesh), at::empty_like(before)};
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const auto sizes =
        c10::static_intrusive_pointer_cast<Sizes>(context->saved_data["sizes"].toCapsule());
    const auto back = c10::make_intrusive<Sizes>(sizes->from, sizes->to, sizes->mesh);
    return {apply(grads[0], at::empty_like(grads[1]).set_requires_grad(true), back)[0], grads[1],
            at::Tensor()};
  }
};

// Of exchanges that no other one comes before.
at::Tensor first_exchange(const at::Tensor& rows) {
  return at::empty({0}, rows.options().dtype(at::kFloat)).set_requires_grad(true);
}

// How many tokens each rank has for each expert, and where a rank's tokens stand.
struct Plan {
  at::Tensor order;               // of [tokens * k] choices: by expert
  std::vector<int64_t> to, from;  // rows, by rank
  at::Tensor by_expert;           // of rows that come: by expert, then by rank
  at::Tensor counts;              // of this rank's experts
};

// where: " (rank 1)", or nothing.
void check_routing(const at::Tensor& tokens, const ExpertRouting& routing,
                   const std::string& where) {
  TORCH_CHECK_VALUE(tokens.dim() == 2 && routing.experts.dim() == 2 &&
                        routing.experts.size(0) == tokens.size(0) &&
                        routing.weights.sizes() == routing.experts.sizes() && routing.count > 0,
                    "route_to_experts: 'tokens' has shape ", tokens.sizes(), ", 'experts' ",
                    routing.experts.sizes(), ", 'weights' ", routing.weights.sizes(),
                    ", 'count' is ", routing.count,
                    "; expected [tokens, width], [tokens, k], [tokens, k] and at least 1", where);
}

std::optional<int64_t> expert_out_of_range(const at::Tensor& chosen, int64_t count) {
  if (chosen.numel() == 0) return std::nullopt;
  const auto least = chosen.min().item<int64_t>(), most = chosen.max().item<int64_t>();
  if (least < 0) return least;
  return most < count ? std::nullopt : std::optional(most);
}

std::string out_of_range(int64_t expert, int64_t count) {
  return c10::str("route_to_experts: expert ", expert,
                  " of a token is out of range: allowed are 0 to ", count - 1);
}

// int64 [ranks, experts]: of each rank, how many of its choices each expert is.
at::Tensor counts_of_all(const at::Tensor& tokens, const ExpertRouting& routing,
                         const at::Tensor& chosen, const DeviceMesh& mesh) {
  internal::Claims claims("route_to_experts");
  claims.add("the number of experts", static_cast<double>(routing.count));
  claims.add("the number of experts of a token", static_cast<double>(routing.experts.size(1)));
  claims.add("the width of tokens", static_cast<double>(tokens.size(1)));
  claims.add("the dtype of tokens", std::string(c10::toString(tokens.scalar_type())));
  const auto wrong = expert_out_of_range(chosen, routing.count);
  if (wrong) claims.refuse(out_of_range(*wrong, routing.count) + where_is(mesh));
  const at::Tensor own =
      wrong ? at::zeros({routing.count}, at::kLong) : at::bincount(chosen, {}, routing.count);
  return numbers_of_all("route_to_experts", claims, own, mesh, "numbers of tokens for experts",
                        "route tokens alike on every rank");
}

at::Tensor chosen_on_cpu(const ExpertRouting& routing) {
  return routing.experts.detach().flatten().to(at::kCPU, at::kLong);
}

// The places of `values` in rising order of these, of equal ones as they stand.
at::Tensor sorted(const at::Tensor& values) {
  return at::argsort(values, /*stable=*/true, 0, /*descending=*/false);
}

Plan plan_of(const at::Tensor& tokens, const ExpertRouting& routing, const DeviceMesh& mesh) {
  const at::Tensor chosen = chosen_on_cpu(routing);
  const at::Tensor counts = counts_of_all(tokens, routing, chosen, mesh);
  const int64_t ranks = mesh.size(), own = mesh.local_rank();
  Plan plan{.order = sorted(chosen)};
  const Chunk here = internal::chunk_of(routing.count, ranks, own);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const Chunk there = internal::chunk_of(routing.count, ranks, rank);
    plan.to.push_back(counts[own].narrow(0, there.offset, there.length).sum().item<int64_t>());
    plan.from.push_back(counts[rank].narrow(0, here.offset, here.length).sum().item<int64_t>());
  }
  const at::Tensor of_here = counts.narrow(1, here.offset, here.length);  // [ranks, experts]
  const at::Tensor expert_of_row = at::repeat_interleave(at::arange(here.length).repeat({ranks}),
                                                         of_here.contiguous().flatten());
  plan.by_expert = sorted(expert_of_row);
  plan.counts = of_here.sum(0);
  return plan;
}

// The order that undoes `order`.
at::Tensor order_back(const at::Tensor& order) {
  return at::empty_like(order).scatter_(0, order, at::arange(order.numel()));
}

at::Tensor rows_of(const at::Tensor& tensor, const at::Tensor& order) {
  return tensor.index_select(0, order.to(tensor.device()));
}

void check_made(const at::Tensor& made, const at::Tensor& rows, const std::string& where) {
  TORCH_CHECK_VALUE(made.dim() == 2 && made.size(0) == rows.size(0),
                    "route_to_experts: the experts made ", made.sizes(), " of ", rows.sizes(),
                    "; expected a row of each", where);
}

// `made` has a row for each choice, by expert.
at::Tensor added_up(const at::Tensor& made, const at::Tensor& order, const at::Tensor& weights) {
  const at::Tensor of_choices = rows_of(made, order_back(order)).unflatten(0, weights.sizes());
  return of_choices.mul(weights.unsqueeze(-1)).sum(1);
}

// The identity, whose gradient counts `factor` times.
class GradientTimes : public torch::autograd::Function<GradientTimes> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& tensor,
                            double factor) {
    context->saved_data["factor"] = factor;
    return tensor.detach();  // may be written in place
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    return {grads[0].mul(context->saved_data["factor"].toDouble()), at::Tensor()};
  }
};

// What experts are given and make where the tokens of one batch are cut over `ranks`:
// their parameters get terms of its gradient, and what averages over batches counts one
// on each of these ranks.
ExpertFunction of_cut_batch(const ExpertFunction& experts, double ranks) {
  return [=](const at::Tensor& rows, const at::Tensor& counts) {
    const at::Tensor made = experts(GradientTimes::apply(rows, 1 / ranks), counts);
    return GradientTimes::apply(made, ranks);
  };
}

// route(tokens, routing, experts) of this rank's of `tokens`, a DTensor.
template <class Route>
at::Tensor of_own_tokens(const DTensor& tokens, const ExpertRouting& routing,
                         const ExpertFunction& experts, const Route& route) {
  const DeviceMesh& mesh = tokens.device_mesh();
  check_routing(tokens, routing, where_is(mesh));
  auto placements = tokens.placements();
  double ranks = 1;
  for (size_t m = 0; m < placements.size(); ++m) {
    if (placements[m].is_shard(0)) {
      ranks *= static_cast<double>(mesh.size(static_cast<int64_t>(m)));
    } else {
      placements[m] = Replicate{};
    }
  }
  const std::vector<Placement> whole(placements.size(), Replicate{});
  const auto own = [&](const at::Tensor& tensor) {
    const DTensor on_mesh = is_dtensor(tensor) ? DTensor(tensor) : from_local(tensor, mesh, whole);
    return on_mesh.redistribute(placements).to_local();
  };
  const at::Tensor made = route(
      own(tokens),
      {.experts = own(routing.experts), .weights = own(routing.weights), .count = routing.count},
      of_cut_batch(experts, ranks));
  return from_local(made, mesh, placements, {.shape = {{tokens.size(0), made.size(1)}}});
}

// Collective over the mesh: every rank learns what each one sends, and all of them throw
// alike.
void check_sizes(const at::Tensor& rows, const std::vector<int64_t>& to,
                 const std::vector<int64_t>& from, const DeviceMesh& mesh) {
  const auto ranks = static_cast<size_t>(mesh.size());
  const auto is_size = [](int64_t size) { return size >= 0; };
  internal::Claims claims("all_to_all");
  if (rows.dim() == 0 || to.size() != ranks || from.size() != ranks ||
      !std::all_of(to.begin(), to.end(), is_size) || sum_of(to) != rows.size(0)) {
    claims.refuse(c10::str("all_to_all: 'rows' has shape ", rows.sizes(), ", 'to' is ",
                           c10::IntArrayRef(to), ", 'from' ", c10::IntArrayRef(from),
                           "; expected as many numbers as ranks, ", ranks,
                           ", none below 0, which add up to the rows", where_is(mesh)));
  }
  const auto padded = [&](std::vector<int64_t> sizes) {
    sizes.resize(ranks);
    return at::tensor(sizes, at::kLong);
  };
  const auto sizes = numbers_of_all("all_to_all", claims, at::cat({padded(to), padded(from)}), mesh,
                                    "sizes of an all_to_all", "give sizes that fit on every rank")
                         .unflatten(1, {2, mesh.size()});
  const at::Tensor sent = sizes.select(1, 0), expected = sizes.select(1, 1).t();
  const at::Tensor wrong = (sent != expected).nonzero();
  if (wrong.numel() == 0) return;
  const auto by = wrong[0][0].item<int64_t>(), to_rank = wrong[0][1].item<int64_t>();
  TORCH_CHECK_VALUE(false, "all_to_all: rank ", mesh.ranks()[static_cast<size_t>(by)], " sends ",
                    sent[by][to_rank].item<int64_t>(), " rows to rank ",
                    mesh.ranks()[static_cast<size_t>(to_rank)], ", which expects ",
                    expected[by][to_rank].item<int64_t>(), where_is(mesh));
}

}  // namespace

at::Tensor all_to_all(const at::Tensor& rows, const std::vector<int64_t>& to,
                      const std::vector<int64_t>& from, const DeviceMesh& mesh) {
  check_mesh("all_to_all", mesh);
  check_sizes(rows, to, from, mesh);
  if (!rows.is_floating_point()) return exchanged(rows, to, from, mesh);
  const auto sizes = c10::make_intrusive<AllToAll::Sizes>(to, from, mesh);
  return AllToAll::apply(rows, first_exchange(rows), sizes)[0];
}

at::Tensor route_to_experts(const at::Tensor& tokens, const ExpertRouting& routing,
                            const DeviceMesh& mesh, const ExpertFunction& experts) {
  check_mesh("route_to_experts", mesh);
  if (is_dtensor(tokens)) {
    return of_own_tokens(
        DTensor(tokens), routing, experts,
        [&](const at::Tensor& own, const ExpertRouting& of_own, const ExpertFunction& counted) {
          return route_to_experts(own, of_own, mesh, counted);
        });
  }
  check_routing(tokens, routing, where_is(mesh));
  const Plan plan = plan_of(tokens, routing, mesh);
  const int64_t choices = routing.experts.size(1);
  const at::Tensor sent = rows_of(tokens, plan.order.floor_divide(choices));
  using Sizes = AllToAll::Sizes;
  const auto there = AllToAll::apply(sent, first_exchange(sent),
                                     c10::make_intrusive<Sizes>(plan.to, plan.from, mesh));
  const at::Tensor& come = there[0];
  const at::Tensor made = experts(rows_of(come, plan.by_expert), plan.counts);
  check_made(made, come, where_is(mesh));
  const auto back = AllToAll::apply(rows_of(made, order_back(plan.by_expert)), there[1],
                                    c10::make_intrusive<Sizes>(plan.from, plan.to, mesh));
  return added_up(back[0], plan.order, routing.weights);
}

at::Tensor route_to_experts(const at::Tensor& tokens, const ExpertRouting& routing,
                            const ExpertFunction& experts) {
  if (is_dtensor(tokens)) {
    return of_own_tokens(
        DTensor(tokens), routing, experts,
        [](const at::Tensor& own, const ExpertRouting& of_own, const ExpertFunction& counted) {
          return route_to_experts(own, of_own, counted);
        });
  }
  check_routing(tokens, routing, "");
  const at::Tensor chosen = chosen_on_cpu(routing);
  const auto wrong = expert_out_of_range(chosen, routing.count);
  if (wrong) TORCH_CHECK_VALUE(false, out_of_range(*wrong, routing.count));
  const at::Tensor order = sorted(chosen);
  const at::Tensor rows = rows_of(tokens, order.floor_divide(routing.experts.size(1)));
  const at::Tensor made = experts(rows, at::bincount(chosen, {}, routing.count));
  check_made(made, rows, "");
  return added_up(made, order, routing.weights);
}

ExpertFunction for_each_expert(std::function<at::Tensor(int64_t, const at::Tensor&)> each) {
  return [each = std::move(each)](const at::Tensor& rows, const at::Tensor& counts) {
    std::vector<at::Tensor> made;
    int64_t at = 0;
    for (int64_t expert = 0; expert < counts.numel(); ++expert) {
      const auto length = counts[expert].item<int64_t>();
      made.push_back(each(expert, rows.narrow(0, at, length)));
      at += length;
    }
    return at::cat(made);
  };
}

namespace {

at::Tensor own_matrices(const at::Tensor& weights) {
  if (!is_dtensor(weights)) return weights;
  static_cast<void>(internal::is_recorded_member(weights));  // its entry may have been frozen since
  const DTensor on_mesh(weights);
  for (const Placement& placement : on_mesh.placements()) {
    TORCH_CHECK_VALUE(placement.is_replicate() || placement.is_shard(0),
                      "grouped_linear: 'weights' is a DTensor of ", placement,
                      ", expected Shard(0) or Replicate()", where_is(on_mesh.device_mesh()));
  }
  return on_mesh.to_local();
}

}  // namespace

at::Tensor grouped_linear(const at::Tensor& rows, const at::Tensor& counts,
                          const at::Tensor& weights) {
  const at::Tensor own = own_matrices(weights);
  TORCH_CHECK_VALUE(own.dim() == 3 && rows.dim() == 2 && rows.size(1) == own.size(2) &&
                        counts.dim() == 1 && counts.size(0) == own.size(0),
                    "grouped_linear: 'rows' has shape ", rows.sizes(), ", 'counts' ",
                    counts.sizes(), ", 'weights' ", own.sizes(),
                    " on this rank; expected [n, in], [experts] and [experts, out, in]");
  const at::Tensor numbers = counts.to(at::kCPU, at::kLong).contiguous();
  const c10::IntArrayRef lengths(numbers.const_data_ptr<int64_t>(),
                                 static_cast<size_t>(numbers.numel()));
  TORCH_CHECK_VALUE(sum_of(lengths.vec()) == rows.size(0), "grouped_linear: 'counts' are ", lengths,
                    ", of ", rows.size(0), " rows");
  if (lengths.empty()) return at::linear(rows, own.sum(0));
  const auto parts = rows.split_with_sizes(lengths);
  const auto matrices = own.unbind(0);
  std::vector<at::Tensor> made;
  for (size_t i = 0; i < parts.size(); ++i) made.push_back(at::linear(parts[i], matrices[i]));
  return at::cat(made);
}

}  // namespace fsdp
