// The boundary of a module, as FSDP2's forward has it: inputs are brought to the unit's
// device, and in mixed precision what meets no parameter is cast too.
//
//   auto y = fsdp::forward(block, x, mask);    // instead of block->forward(x, mask)
//
// Where fully_shard was applied to the module itself, inputs are copied to the device of
// its parameters if that is not the CPU, floating inputs are cast to
// mp_policy.param_dtype (with cast_forward_inputs), and floating outputs to
// mp_policy.output_dtype. Other modules, and values that are no tensors, are left alone.
// A tensor that needs no change stays the same one. Copies and casts are differentiable.
// Profilers see fsdp::forward(unit). Collective as the module's forward.
//
// Tensors are found in vectors, arrays, optionals, pairs, tuples, std::map and its kin,
// torch::OrderedDict, and in structs whose fields are listed once:
//
//   struct Batch {
//     torch::Tensor tokens;
//     std::vector<torch::Tensor> masks;
//   };
//   template <>
//   struct fsdp::TensorFields<Batch> {
//     static auto of(Batch& batch) { return std::tie(batch.tokens, batch.masks); }
//   };
#pragma once

#include "device_mesh/api.h"

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
}

namespace torch {
template <typename Key, typename Value>
class OrderedDict;
}

namespace fsdp {

// Specialised for a struct whose tensors forward() is to find: of(struct) gives
// references to its fields (std::tie), which may be containers and structs in turn.
template <class Struct>
struct TensorFields {};

namespace internal {

class ProfilerRange;

// What tensors become; unset: as they are. The dtype is for floating ones.
struct CastTo {
  std::optional<at::ScalarType> dtype = {};
  std::optional<c10::Device> device = {};
};

struct BoundaryCasts {
  CastTo inputs = {}, outputs = {};
};
FSDP_API BoundaryCasts boundary_casts_of(const torch::nn::Module& module);

FSDP_API at::Tensor cast_tensor(const at::Tensor& tensor, const CastTo& to);

// Casts the tensors in a value; specialised for what may hold some.
template <class Value>
struct CastEach {};

template <class Value>
concept MayHoldTensors = requires(const Value& value) {
  CastEach<Value>::of(value, CastTo());
};

// What holds none is passed on.
template <class Value>
decltype(auto) cast_each(Value&& value, const CastTo& to) {
  using Plain = std::remove_cvref_t<Value>;
  if constexpr (MayHoldTensors<Plain>) {
    return CastEach<Plain>::of(value, to);
  } else {
    return std::forward<Value>(value);
  }
}

template <>
struct CastEach<at::Tensor> {
  static at::Tensor of(const at::Tensor& tensor, const CastTo& to) {
    return cast_tensor(tensor, to);
  }
};
template <MayHoldTensors Element>
struct CastEach<std::vector<Element>> {
  static std::vector<Element> of(const std::vector<Element>& values, const CastTo& to) {
    std::vector<Element> cast;
    cast.reserve(values.size());
    for (const auto& value : values) cast.push_back(cast_each(value, to));
    return cast;
  }
};
template <MayHoldTensors Element>
struct CastEach<std::optional<Element>> {
  static std::optional<Element> of(const std::optional<Element>& value, const CastTo& to) {
    return value ? std::optional<Element>(cast_each(*value, to)) : std::nullopt;
  }
};
template <class First, class Second>
struct CastEach<std::pair<First, Second>> {
  static std::pair<First, Second> of(const std::pair<First, Second>& both, const CastTo& to) {
    return {cast_each(both.first, to), cast_each(both.second, to)};
  }
};
template <class... Elements>
struct CastEach<std::tuple<Elements...>> {
  static std::tuple<Elements...> of(const std::tuple<Elements...>& values, const CastTo& to) {
    return std::apply(
        [&to](const Elements&... each) { return std::tuple<Elements...>(cast_each(each, to)...); },
        values);
  }
};

template <MayHoldTensors Element, size_t kSize>
struct CastEach<std::array<Element, kSize>> {
  static std::array<Element, kSize> of(std::array<Element, kSize> values, const CastTo& to) {
    for (auto& value : values) value = cast_each(value, to);
    return values;
  }
};
// std::map, std::unordered_map and what looks like them.
template <class Map>
requires MayHoldTensors<typename Map::mapped_type>
struct CastEach<Map> {
  static Map of(Map values, const CastTo& to) {
    for (auto& [key, value] : values) value = cast_each(value, to);
    return values;
  }
};
template <class Key, MayHoldTensors Value>
struct CastEach<torch::OrderedDict<Key, Value>> {
  static torch::OrderedDict<Key, Value> of(torch::OrderedDict<Key, Value> values,
                                           const CastTo& to) {
    for (auto& item : values) item.value() = cast_each(item.value(), to);
    return values;
  }
};
template <class Struct>
requires requires(Struct& fields) { TensorFields<Struct>::of(fields); }
struct CastEach<Struct> {
  static Struct of(Struct value, const CastTo& to) {
    std::apply([&to](auto&... field) { ((field = cast_each(field, to)), ...); },
               TensorFields<Struct>::of(value));
    return value;
  }
};

// What profilers see of a unit's forward while it lives.
class [[nodiscard]] FSDP_API ForwardRange {
 public:
  [[nodiscard]] explicit ForwardRange(const torch::nn::Module& module);
  ~ForwardRange();
  ForwardRange(const ForwardRange&) = delete;

 private:
  std::unique_ptr<ProfilerRange> range_;  // null where nobody looks
};

template <class Module, class... Inputs>
auto forward_module(Module& module, Inputs&&... inputs) {
  const ForwardRange range(module);
  const auto casts = boundary_casts_of(module);
  auto output = module.forward(cast_each(std::forward<Inputs>(inputs), casts.inputs)...);
  return std::remove_cvref_t<decltype(output)>(cast_each(std::move(output), casts.outputs));
}

}  // namespace internal

// `module`: a module, a ModuleHolder or a shared_ptr.
template <class Module, class... Inputs>
auto forward(Module& module, Inputs&&... inputs) {
  if constexpr (requires { module.ptr(); }) {
    return internal::forward_module(*module.ptr(), std::forward<Inputs>(inputs)...);
  } else if constexpr (requires { *module; }) {
    return internal::forward_module(*module, std::forward<Inputs>(inputs)...);
  } else {
    return internal::forward_module(module, std::forward<Inputs>(inputs)...);
  }
}

}  // namespace fsdp
