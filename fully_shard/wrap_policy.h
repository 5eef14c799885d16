// Which modules become units: what auto_shard() and plan_units() ask about each module.
//
//   auto blocks = fsdp::by_type<Block>();      // every Block
//   auto head = fsdp::by_fn(
//       [&](torch::nn::Module& module) { return &module == model->head.get(); });
//   auto large = fsdp::by_size(10'000'000);    // whatever has ten million elements left
//   fsdp::auto_shard(model, fsdp::by_any({blocks, head, large}), mesh);
//
// A policy is asked twice of a module: before the modules below it whether to look for
// units there, and after them whether it is a unit itself. "No" to the first answers the
// second, too. Both times it is told the numel that is left: the elements of the
// parameters at and below the module that no unit chosen so far has, and that are not
// ignored.
//
// Local. Every rank must be given a policy that answers alike.
#pragma once

#include "device_mesh/api.h"
#include "fully_shard/policies.h"

#include <concepts>
#include <cstdint>
#include <functional>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
}

namespace fsdp {

class WrapPolicy;

namespace internal {
template <class Function>
concept AsksInOne =
    !std::same_as<Function, WrapPolicy> &&
    std::is_invocable_r_v<bool, Function&, torch::nn::Module&, /*recurse=*/bool, int64_t>;
}  // namespace internal

class FSDP_API WrapPolicy {
 public:
  // FSDP1's form, one callable for both questions. recurse: whether to look below the
  // module; else whether it is a unit, with the options that were given for the root.
  using Ask = std::function<bool(torch::nn::Module& module, bool recurse, int64_t numel_left)>;
  // Throws ValueError for an empty function.
  WrapPolicy(Ask ask);
  template <internal::AsksInOne Function>
  WrapPolicy(Function ask) : WrapPolicy(Ask(std::move(ask))) {}

  // The general form: a unit's options, or nothing where the module is no unit.
  // `root_options` are those given for the root, of whose ignored parameters the ones
  // that the module does not have are left out.
  using LooksBelow = std::function<bool(torch::nn::Module& module, int64_t numel_left)>;
  using Choose = std::function<std::optional<FullyShardOptions>(
      torch::nn::Module& module, int64_t numel_left, const FullyShardOptions& root_options)>;
  // Throws ValueError for an empty function.
  WrapPolicy(LooksBelow looks_below, Choose choose);

  bool looks_below(torch::nn::Module& module, int64_t numel_left) const;
  std::optional<FullyShardOptions> choose(torch::nn::Module& module, int64_t numel_left,
                                          const FullyShardOptions& root_options) const;
  // As FSDP1 asks, so that policies can be built of policies.
  bool operator()(torch::nn::Module& module, bool recurse, int64_t numel_left) const;

 private:
  LooksBelow looks_below_;
  Choose choose_;
};

// The modules for which `is_unit` is true.
[[nodiscard]] FSDP_API WrapPolicy by_fn(std::function<bool(torch::nn::Module& module)> is_unit);
// The modules for which it answers with options. It gets the root's, and gives them back
// as they are, or changed for this unit:
//
//   auto policy = fsdp::by_fn([](torch::nn::Module& module, fsdp::FullyShardOptions options)
//                                 -> std::optional<fsdp::FullyShardOptions> {
//     if (!module.as<Block>()) return std::nullopt;
//     options.reshard_after_forward = false;
//     return options;
//   });
//
// What the root ignores stays ignored whatever it answers. Both forms throw ValueError
// for an empty function; a function of another form does not compile.
[[nodiscard]] FSDP_API WrapPolicy by_fn(
    std::function<std::optional<FullyShardOptions>(torch::nn::Module& module,
                                                   FullyShardOptions root_options)>
        options_of);

// Every module that has at least `min_numel` elements left once the modules below it
// were asked. Modules with fewer are not looked into, nor is MultiheadAttention: they are
// part of the unit around them. A container without forward (ModuleList, ModuleDict,
// ParameterList, ParameterDict) is never a unit, the modules in it may be. Throws
// ValueError for a min_numel below 1.
[[nodiscard]] FSDP_API WrapPolicy by_size(int64_t min_numel = 100'000'000);

// Every module but containers without forward.
[[nodiscard]] FSDP_API WrapPolicy every_module();

// What at least one of them wants, for both questions; the options are those of the first
// that chooses the module. Throws ValueError for an empty list.
[[nodiscard]] FSDP_API WrapPolicy by_any(std::vector<WrapPolicy> policies);

namespace internal {

// The class of a module: Block itself, or what it holds where it is a ModuleHolder.
template <class Block>
struct ModuleClass {
  using Type = Block;
};
template <class Block>
requires requires { typename Block::ContainedType; }
struct ModuleClass<Block> {
  using Type = typename Block::ContainedType;
};

template <class Block>
bool is_a(const torch::nn::Module& module) {
  return dynamic_cast<const typename ModuleClass<Block>::Type*>(&module) != nullptr;
}

}  // namespace internal

// Every module of one of these classes, or of a class derived from one. They may be given
// by their ModuleHolder: Linear is LinearImpl.
template <class... Blocks>
[[nodiscard]] WrapPolicy by_type() {
  static_assert(sizeof...(Blocks) > 0, "by_type needs at least one class of modules");
  return by_fn([](torch::nn::Module& module) { return (internal::is_a<Blocks>(module) || ...); });
}

// Every module of one of these classes, and derived ones, as a unit of its own that mixed
// precision leaves out: where the root's mp_policy has a param_dtype, its parameters
// stay, its inputs are cast to, and its gradients are reduced in fp32. For normalisation,
// before the policy that chooses the other units (FSDP1 exempts batch norms unasked):
//
//   auto policy =
//       fsdp::by_any({fsdp::in_full_precision<torch::nn::LayerNorm>(), fsdp::by_type<Block>()});
template <class... Classes>
[[nodiscard]] WrapPolicy in_full_precision() {
  static_assert(sizeof...(Classes) > 0, "in_full_precision needs at least one class of modules");
  return by_fn(
      [](torch::nn::Module& module, FullyShardOptions options) -> std::optional<FullyShardOptions> {
        if (!(internal::is_a<Classes>(module) || ...)) return std::nullopt;
        const bool is_mixed = options.mp_policy.param_dtype.has_value();
        options.mp_policy = {};
        if (is_mixed) options.mp_policy.param_dtype = at::kFloat;
        return options;
      });
}

}  // namespace fsdp
