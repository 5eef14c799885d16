// For optimizers of your own that need whole tensors. During a step each parameter's
// tensor is whole on one rank, its owner (what torchtitan calls the compute layout
// Owned), however the parameter lies. Muon steps so; examples/shampoo.h does, too.
//
//   fsdp::OwnedStep owned(params, {.optimizer = "Shampoo"});
//   torch::Tensor left = owned.zeros(i, {rows, rows});   // state, where it is computed with
//   owned.run(positions_with_gradients,
//             {.input = [&](size_t i) { return params[i].grad(); },
//              .compute = [&](size_t i, const torch::Tensor& whole) { return update(i, whole); },
//              .apply = [&](size_t i, const torch::Tensor& u) { params[i].add_(u, -lr); }});
//
// Owners are dealt out by cost over all ranks of a parameter's mesh when this is made,
// and stay. A tensor that nobody has a part of is computed with where it is, and nothing
// is sent: a plain or replicated one on each rank, one that is placed Owned on its owner.
// Else every element travels to the owner and back once.
#pragma once

#include "device_mesh/api.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fsdp {

struct OwnedStepOptions {
  std::string optimizer;  // its name, in errors
  // The cost of computing with a parameter of that shape, in any unit of measure; by
  // default the number of its elements.
  std::function<double(at::IntArrayRef shape)> cost = {};
  // What inputs and results are sent as; by default the parameter's dtype.
  std::optional<at::ScalarType> sent_as = {};
  // The bytes of one bucket of tensors, all ranks together. While one bucket is computed
  // with, the next one travels, so two are in memory at a time.
  int64_t bucket_bytes = int64_t{64} << 20;
};

struct OwnedWork {
  // The tensor of parameter `i` that is computed with. It lies as the parameter does.
  std::function<at::Tensor(size_t i)> input;
  // Called on the owner, or on every rank that has the whole. `whole`: plain, of the
  // parameter's shape and of `sent_as`. Returns a tensor of that shape; any dtype.
  std::function<at::Tensor(size_t i, const at::Tensor& whole)> compute;
  // Called on every rank with the result, which lies as the parameter, of `sent_as`.
  std::function<void(size_t i, const at::Tensor& result)> apply;
};

class FSDP_API OwnedStep {
 public:
  // Ranks give the same parameters in the same order. Local. Throws ValueError for an
  // undefined parameter and for one that is Partial.
  OwnedStep(const std::vector<at::Tensor>& params, OwnedStepOptions options);
  ~OwnedStep();
  OwnedStep(OwnedStep&&) noexcept;
  OwnedStep& operator=(OwnedStep&&) noexcept;

  // Whether this rank computes with parameter `i`. Local.
  bool computes(size_t i) const;
  // State of parameter `i` of any shape of one dimension or more: a DTensor that is whole
  // where it is computed with and has no elements elsewhere, so that checkpoints save it
  // once and load it for other owners; plain for a plain parameter. Local.
  at::Tensor zeros(size_t i, at::IntArrayRef shape, at::ScalarType dtype = at::kFloat) const;
  // What this rank has of such state: shares memory. Local.
  static at::Tensor local(const at::Tensor& state);

  // For the parameters at these positions, which all ranks give alike: those with a
  // gradient, say. Each function is called once for each that it has to do with, without
  // a graph. Collective over the meshes of parameters that are cut. Throws ValueError for
  // positions out of range or given twice, and for inputs and results of other shapes;
  // and as collectives do, an error that names both ranks where they do not step the
  // same. An error leaves applied what came back before it.
  void run(const std::vector<size_t>& positions, const OwnedWork& work) const;

 private:
  struct Plan;
  std::unique_ptr<const Plan> plan_;
};

}  // namespace fsdp
