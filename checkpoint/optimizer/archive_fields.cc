#include "checkpoint/optimizer/archive_fields.h"

#include "checkpoint/optimizer/optimizer_class.h"

#include <ATen/ops/scalar_tensor.h>
#include <c10/util/Exception.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <memory>
#include <set>
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

}  // namespace fsdp::internal::checkpoint
