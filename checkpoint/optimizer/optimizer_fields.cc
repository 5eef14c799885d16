#include "checkpoint/optimizer/optimizer_fields.h"

#include "dtensor/dtensor.h"

#include <ATen/core/List.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <memory>
#include <set>
#include <typeinfo>
#include <utility>

namespace fsdp::internal::checkpoint {
namespace {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;
using Module = torch::jit::Module;

constexpr const char* kNobody = "0";  // the key of no parameter
using Unit = std::shared_ptr<torch::jit::CompilationUnit>;

// An archive is a private Module. An explicit instantiation may name private members;
// another LibTorch that names it otherwise does not compile.
template <class Tag, typename Tag::type kMember>
struct Reveal {
  friend typename Tag::type member(Tag) { return kMember; }
};
struct OutputModule {
  using type = Module OutputArchive::*;
  friend type member(OutputModule);
};
struct InputModule {
  using type = Module InputArchive::*;
  friend type member(InputModule);
};
template struct Reveal<OutputModule, &OutputArchive::module_>;
template struct Reveal<InputModule, &InputArchive::module_>;

template <class Serializable>
Fields read_fields(const Serializable& serializable) {
  OutputArchive archive;
  serializable.serialize(archive);
  Fields fields;
  const Module& module = archive.*member(OutputModule());
  for (const auto& attribute : module.named_attributes(/*recurse=*/false)) {
    fields.emplace(attribute.name, attribute.value);
  }
  return fields;
}

void put(Module& module, const std::string& name, const c10::IValue& value) {
  module.register_attribute(name, value.type(), value);
}

Module new_module(const Unit& unit, const Fields& fields = {}) {
  Module module("__torch__.Module", unit, /*shouldMangle=*/true);
  for (const auto& [name, value] : fields) put(module, name, value);
  return module;
}

c10::IValue size_value(size_t size) {
  return at::scalar_tensor(static_cast<int64_t>(size), at::kLong);
}

std::string key_of(const at::Tensor& parameter) {
  return std::to_string(reinterpret_cast<size_t>(parameter.unsafeGetTensorImpl()));
}

}  // namespace

Fields fields_of(const torch::optim::OptimizerOptions& options) { return read_fields(options); }
Fields fields_of(const torch::optim::OptimizerParamState& state) { return read_fields(state); }

bool is_number(const c10::IValue& value) {
  return value.isInt() || value.isDouble() || value.isBool();
}

at::Tensor number_tensor(const c10::IValue& value) {
  const auto dtype = value.isInt() ? at::kLong : value.isBool() ? at::kBool : at::kDouble;
  return at::scalar_tensor(value.toScalar(), dtype);
}

void set_fields(torch::optim::Optimizer& optimizer, const OptimizerFields& fields) {
  const auto unit = std::make_shared<torch::jit::CompilationUnit>();
  Module states = new_module(unit), groups = new_module(unit);
  std::set<const void*> seen;
  put(groups, "param_groups/size", size_value(optimizer.param_groups().size()));
  for (size_t i = 0; i < optimizer.param_groups().size(); ++i) {
    const auto& params = optimizer.param_groups()[i].params();
    Module group = new_module(unit);
    put(group, "params/size", size_value(params.size()));
    for (size_t j = 0; j < params.size(); ++j) {
      // LibTorch moves the state out under a key, so it may not come there twice.
      const bool is_first = seen.insert(params[j].unsafeGetTensorImpl()).second;
      put(group, "params/" + std::to_string(j),
          c10::IValue(is_first ? key_of(params[j]) : kNobody));
      const auto state = fields.state.find(params[j].unsafeGetTensorImpl());
      if (!is_first || state == fields.state.end()) continue;
      states.register_module(key_of(params[j]), new_module(unit, state->second));
    }
    group.register_module("options", new_module(unit, fields.options[i]));
    groups.register_module("param_groups/" + std::to_string(i), group);
  }
  InputArchive archive;
  Module& root = archive.*member(InputModule());
  root = new_module(unit, {{"pytorch_version", "1.5.0"}});
  root.register_module("state", states);
  root.register_module("param_groups", groups);
  try {
    optimizer.load(archive);
  } catch (const c10::Error& error) {
    TORCH_CHECK_VALUE(false, "the state is not such as ", class_of(optimizer),
                      " has: ", error.what_without_backtrace());
  }
}

std::string class_of(const torch::optim::Optimizer& optimizer) {
  return c10::demangle(typeid(optimizer).name());
}

bool has_options_like(const torch::optim::Optimizer& optimizer,
                      const std::set<std::string>& names) {
  std::set<std::string> own;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& [name, value] : fields_of(group.options())) own.insert(name);
  }
  return std::includes(own.begin(), own.end(), names.begin(), names.end()) ||
         std::includes(names.begin(), names.end(), own.begin(), own.end());
}

void forget_state(torch::optim::Optimizer& optimizer, const std::set<const void*>& handles) {
  const bool is_adagrad = dynamic_cast<torch::optim::Adagrad*>(&optimizer) != nullptr;
  for (auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      void* const handle = parameter.unsafeGetTensorImpl();
      if (handles.count(handle) == 0) continue;
      optimizer.state().erase(handle);
      if (!is_adagrad) continue;
      const auto& options = static_cast<const torch::optim::AdagradOptions&>(group.options());
      auto state = std::make_unique<torch::optim::AdagradParamState>();
      state->step(0);
      state->sum(at::full_like(parameter.detach(), options.initial_accumulator_value()));
      optimizer.state()[handle] = std::move(state);
    }
  }
}

at::Tensor StatePlacement::distributed_at(const at::Tensor& parameter,
                                          const StatePlace& place) const {
  void* const handle = parameter.unsafeGetTensorImpl();
  const auto state = optimizer_.state().find(handle);
  if (state == optimizer_.state().end()) return {};
  auto known = fields_.find(handle);
  if (known == fields_.end()) known = fields_.emplace(handle, fields_of(*state->second)).first;
  const auto field = known->second.find(place.field);
  if (field == known->second.end()) return {};
  at::Tensor tensor;
  if (field->second.isTensor()) {
    tensor = field->second.toTensor();
  } else if (field->second.isTensorList()) {
    const auto list = field->second.toTensorVector();
    if (place.index >= 0 && static_cast<size_t>(place.index) < list.size())
      tensor = list[static_cast<size_t>(place.index)];
  }
  return tensor.defined() && is_dtensor(tensor) ? tensor : at::Tensor();
}

at::Tensor StatePlacement::like(const at::Tensor& parameter, const StatePlace& place,
                                at::IntArrayRef shape) const {
  const at::Tensor own = distributed_at(parameter, place);
  if (own.defined() && own.sizes() == shape) return own;
  return parameter.sizes() == shape ? parameter : at::Tensor();
}

at::Tensor StatePlacement::like_of_part(const at::Tensor& parameter,
                                        const StatePlace& place) const {
  const at::Tensor own = distributed_at(parameter, place);
  return own.defined() ? own : parameter;
}

}  // namespace fsdp::internal::checkpoint
