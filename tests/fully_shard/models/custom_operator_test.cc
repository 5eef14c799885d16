// Custom operators see parameters that are empty between operators, whatever their kernel
// and whenever it was registered: bodies that read raw memory, call operators on another
// module's parameter, or take lists with holes.
#include "on_demand/gate_key.h"
#include "tests/fully_shard/support/bit_equality.h"
#include "tests/support/write_checks.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>
#include <torch/library.h>

namespace fsdp::testing {
namespace {

using c10::DispatchKey;
using torch::Tensor;
using OptionalTensors = c10::List<std::optional<Tensor>>;

Tensor raw_product(const Tensor& x, const Tensor& w) {
  auto product = torch::empty_like(x);
  const auto *a = x.const_data_ptr<float>(), *b = w.const_data_ptr<float>();
  for (int64_t i = 0; i < x.numel(); ++i) product.mutable_data_ptr<float>()[i] = a[i] * b[i];
  return product;
}

void raw_scale(const Tensor& w) {
  for (int64_t i = 0; i < w.numel(); ++i) w.mutable_data_ptr<float>()[i] *= 2;
}
void raw_scale_(Tensor& w) { raw_scale(w); }

// Another module's parameter, as a closure would have it. Ranks are threads.
thread_local Tensor captured;

Tensor product_with_captured(const Tensor& x, const Tensor& w) {
  const auto y = torch::linear(x, captured);
  return y + raw_product(x, w);
}

Tensor sum_of_raw_products(const OptionalTensors& factors, const std::optional<Tensor>& last) {
  auto sum = torch::ones({4, 4});
  for (const std::optional<Tensor> factor : factors) {
    if (factor && factor->defined()) sum = sum + raw_product(sum, *factor);
  }
  return last && last->defined() ? raw_product(sum, *last) : sum;
}

void define_operators(torch::Library& library) {
  library.def("cpu(Tensor x, Tensor w) -> Tensor");
  library.impl("cpu", torch::dispatch(DispatchKey::CPU, TORCH_FN(raw_product)));
  library.def("explicit(Tensor x, Tensor w) -> Tensor");
  library.impl("explicit",
               torch::dispatch(DispatchKey::CompositeExplicitAutograd, TORCH_FN(raw_product)));
  library.def("implicit(Tensor x, Tensor w) -> Tensor");
  library.impl("implicit",
               torch::dispatch(DispatchKey::CompositeImplicitAutograd, TORCH_FN(raw_product)));
  library.def("catch_all(Tensor x, Tensor w) -> Tensor", TORCH_FN(raw_product));
  library.def("autograd(Tensor x, Tensor w) -> Tensor");
  library.impl("autograd", torch::dispatch(DispatchKey::AutogradCPU, TORCH_FN(raw_product)));
  library.def("captured(Tensor x, Tensor w) -> Tensor");
  library.impl("captured", torch::dispatch(DispatchKey::CPU, TORCH_FN(product_with_captured)));
  library.def("lists(Tensor?[] factors, Tensor? last) -> Tensor");
  library.impl("lists", torch::dispatch(DispatchKey::CPU, TORCH_FN(sum_of_raw_products)));
  library.def("scale_(Tensor(a!) w) -> ()");
  library.impl("scale_", torch::dispatch(DispatchKey::CPU, TORCH_FN(raw_scale_)));
  library.def("undeclared_scale_(Tensor w) -> ()");
  library.impl("undeclared_scale_", torch::dispatch(DispatchKey::CPU, TORCH_FN(raw_scale)));
  library.def("dictionary(Tensor x, Dict(str, Tensor) factors) -> Tensor");
  library.impl("dictionary",
               torch::dispatch(DispatchKey::CPU,
                               [](const Tensor& x, const c10::Dict<std::string, Tensor>& f) {
                                 return raw_product(x, f.at("w"));
                               }));
}

// Before the first fully_shard of the process.
TORCH_LIBRARY(interception_early, library) { define_operators(library); }

// After it: kernels that no listing at start-up could have seen.
void define_late_operators() {
  [[maybe_unused]] static const auto* const library = [] {
    internal::install_gate();
    auto* const late = new torch::Library(torch::Library::DEF, "interception_late", std::nullopt,
                                          __FILE__, __LINE__);
    define_operators(*late);
    return late;  // kernels stay for the life of the process
  }();
}

template <class Function>
auto custom(const std::string& name_space, const char* name) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow((name_space + "::" + name).c_str(), "")
      .typed<Function>();
}

class InterceptionCustomOperators : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (GetParam() == "interception_late") define_late_operators();
  }
  void expect_equal(Case c) const {
    for (const int64_t world : {1, 2, 3}) expect_bit_equal(c, world);
  }
};

TEST_P(InterceptionCustomOperators, KernelsOfEveryKindMayReadRawMemory) {
  for (const char* name : {"cpu", "explicit", "implicit", "catch_all", "autograd"}) {
    SCOPED_TRACE(name);
    expect_equal({name, shapes({{4, 4}}), [&](const Tensors& w, Random& random) -> Tensors {
                    torch::NoGradGuard no_grad;
                    return {custom<Tensor(const Tensor&, const Tensor&)>(GetParam(), name)
                                .call(random({4, 4}), w[0])};
                  }});
  }
}

TEST_P(InterceptionCustomOperators, AKernelMayUseAnotherModulesParameter) {
  expect_equal(
      {"captured", shapes({{4, 4}, {4, 4}}), [&](const Tensors& w, Random& random) -> Tensors {
         torch::NoGradGuard no_grad;
         captured = w[1];
         auto result = custom<Tensor(const Tensor&, const Tensor&)>(GetParam(), "captured")
                           .call(random({4, 4}), w[0]);
         captured = Tensor();
         return {result};
       }});
}

TEST_P(InterceptionCustomOperators, ListsWithHolesAreVisited) {
  expect_equal({"lists", shapes({{4, 4}, {4, 4}}), [&](const Tensors& w, Random&) -> Tensors {
                  torch::NoGradGuard no_grad;
                  OptionalTensors factors;
                  factors.push_back(std::nullopt);
                  factors.push_back(w[0].detach());
                  const auto lists =
                      custom<Tensor(const OptionalTensors&, const std::optional<Tensor>&)>(
                          GetParam(), "lists");
                  return {lists.call(factors, w[1]), lists.call(factors, std::nullopt)};
                }});
}

TEST_P(InterceptionCustomOperators, DeclaredRawWritesAreKept) {
  expect_equal({"scale_", shapes({{4, 4}}), [&](const Tensors& w, Random&) -> Tensors {
                  torch::NoGradGuard no_grad;
                  auto weight = w[0];
                  custom<void(Tensor&)>(GetParam(), "scale_").call(weight);
                  return {w[0]};
                }});
}

TEST_P(InterceptionCustomOperators, UndeclaredRawWritesAreReported) {
  const WriteChecks checks;
  expect_refused({"undeclared_scale_",
                  shapes({{4, 4}}),
                  [&](const Tensors& w, Random&) {
                    torch::NoGradGuard no_grad;
                    custom<void(const Tensor&)>(GetParam(), "undeclared_scale_").call(w[0]);
                    w[0].sum();
                  },
                  {"cell0.weight", "raw pointer"}},
                 2);
}

TEST_P(InterceptionCustomOperators, ParametersInsideDictionariesAreRefusedByName) {
  expect_refused({"dictionary",
                  shapes({{4, 4}}),
                  [&](const Tensors& w, Random& random) {
                    c10::Dict<std::string, Tensor> factors;
                    factors.insert("w", w[0].detach());
                    custom<Tensor(const Tensor&, const c10::Dict<std::string, Tensor>&)>(
                        GetParam(), "dictionary")
                        .call(random({4, 4}), factors);
                  },
                  {"cell0.weight"}},
                 2);
}

INSTANTIATE_TEST_SUITE_P(Registered, InterceptionCustomOperators,
                         ::testing::Values("interception_early", "interception_late"),
                         [](const auto& info) {
                           return info.param == "interception_early" ? "BeforeStartUp"
                                                                     : "AfterStartUp";
                         });

}  // namespace
}  // namespace fsdp::testing
