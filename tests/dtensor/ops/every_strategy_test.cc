// Every strategy of every operator is exact. Sizes are uneven, and some parts empty.
#include "dtensor/layout/shard_layout.h"
#include "dtensor/ops/op_table.h"
#include "tests/dtensor/ops/expect_every_strategy.h"

#include <ATen/ATen.h>
#include <ATen/core/Reduction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>

#include <limits>

namespace fsdp::internal {
namespace {

using Arguments = torch::jit::Stack;

class EveryStrategy : public ::testing::Test {
 protected:
  static void check(const std::string& name, const Arguments& arguments) {
    testing::expect_every_strategy(name, arguments);
  }
  static at::Tensor values(at::IntArrayRef shape) { return at::randn(shape, at::kDouble); }
  static at::Tensor indices(at::IntArrayRef shape, int64_t count) {
    return at::randint(count, shape, at::kLong);
  }
  static c10::IValue none() { return {}; }
};

TEST_F(EveryStrategy, OfProducts) {
  check("mm.", {values({5, 7}), values({7, 3})});
  check("mm.", {values({7, 5}).t(), values({3, 7}).t()});
  check("bmm.", {values({3, 5, 7}), values({3, 7, 2})});
  check("mv.", {values({5, 7}), values({7})});
  for (const char* name : {"dot.", "vdot."}) check(name, {values({7}), values({7})});
  for (const auto& bias :
       {values({3}), values({5, 3}), values({1, 3}), values({5, 1}), values({}), values({1, 1})}) {
    check("addmm.", {bias, values({5, 7}), values({7, 3}), 0.5, 2.0});
  }
  check("addmm.", {values({1}), values({5, 7}), values({7, 1})});
  for (const auto& added : {values({3, 5, 2}), values({1, 5, 2}), values({5, 1}), values({2})}) {
    check("baddbmm.", {added, values({3, 5, 7}), values({3, 7, 2}), 0.5, 2.0});
  }
}

TEST_F(EveryStrategy, OfEmbeddings) {
  for (int64_t padding : {-1, 2}) {
    for (const auto& at : {indices({5}, 7), indices({2, 3}, 7)}) {
      auto shape = at.sizes().vec();
      shape.push_back(3);
      check("embedding.", {values({7, 3}), at, padding, false, false});
      for (bool by_frequency : {false, true}) {
        check("embedding_dense_backward.", {values(shape), at, 7, padding, by_frequency});
      }
    }
  }
}

TEST_F(EveryStrategy, OfLayerNorms) {
  const at::Tensor input = values({5, 2, 3});
  for (const auto& normalized : {std::vector<int64_t>{3}, std::vector<int64_t>{2, 3}}) {
    const at::Tensor weight = values(normalized);
    const at::Tensor bias = values(normalized);
    check("native_layer_norm.", {input, normalized, weight, bias, 1e-5});
    check("native_layer_norm.", {input, normalized, none(), none(), 1e-5});
    const auto [result, mean, rstd] = at::native_layer_norm(input, normalized, weight, bias, 1e-5);
    const at::Tensor grad = values({5, 2, 3});
    for (const auto& mask :
         {c10::List<bool>({true, true, true}), c10::List<bool>({true, false, true})}) {
      check("native_layer_norm_backward.",
            {grad, input, normalized, mean, rstd, weight, bias, mask});
    }
    check("native_layer_norm_backward.", {grad, input, normalized, mean, rstd, none(), none(),
                                          c10::List<bool>({true, false, false})});
  }
}

TEST_F(EveryStrategy, OfSoftmax) {
  for (const int64_t dim : {0, 1, -1}) {
    const at::Tensor input = values({5, 2, 3});
    for (const char* name : {"_softmax.", "_log_softmax."}) check(name, {input, dim, false});
    check("_safe_softmax.", {input, dim, none()});
    const int64_t type = static_cast<int64_t>(at::kDouble);
    check("_softmax_backward_data.", {values({5, 2, 3}), input.softmax(dim), dim, type});
    check("_log_softmax_backward_data.", {values({5, 2, 3}), input.log_softmax(dim), dim, type});
  }
  check("_softmax.", {values({}), 0, false});
}

TEST_F(EveryStrategy, OfWhatKeepsTheDimensionsItWorksAlong) {
  for (const int64_t dim : {0, 1, -1}) {
    const at::Tensor input = values({5, 2, 3});
    for (const char* name : {"cumsum.", "cumprod.", "cumsum_.", "cumprod_."})
      check(name, {input, dim, none()});
    for (const char* name : {"logcumsumexp.", "cummax.", "cummin."}) check(name, {input, dim});
    check("sort.", {input, dim, true});
    check("sort.stable", {input, true, dim, false});
    check("topk.", {input, 2, dim});
    check("flip.", {input, std::vector<int64_t>{dim}});
    check("roll.", {input, std::vector<int64_t>{1}, std::vector<int64_t>{dim}});
  }
  check("flip.", {values({5, 2, 3}), std::vector<int64_t>{0, -1}});
  check("roll.", {values({5, 2, 3}), std::vector<int64_t>{2}, std::vector<int64_t>{}});
  for (const char* name : {"tril.", "triu.", "tril_.", "triu_."})
    check(name, {values({5, 2, 3}), 1});
}

TEST_F(EveryStrategy, OfWhatReducesADimensionThatIsWhole) {
  const at::Tensor input = values({5, 3, 2});
  for (const bool keepdim : {false, true}) {
    for (const int64_t dim : {0, 1, -1}) {
      for (const char* name : {"max.dim", "min.dim", "median.dim", "nanmedian.dim", "mode."})
        check(name, {input, dim, keepdim});
      check("kthvalue.", {input, 2, dim, keepdim});
      for (const char* name : {"argmax.", "argmin."}) check(name, {input, dim, keepdim});
      check("logsumexp.", {input, std::vector<int64_t>{dim}, keepdim});
    }
    for (const char* name : {"argmax.", "argmin."}) check(name, {input, none(), keepdim});
    check("logsumexp.", {input, std::vector<int64_t>{0, 2}, keepdim});
  }
  for (const char* name : {"median.", "nanmedian."}) check(name, {input});
}

TEST_F(EveryStrategy, OfLosses) {
  const at::Tensor input = values({5, 4}).log_softmax(1);
  const at::Tensor target = indices({5}, 4);
  target[1] = -100;
  const at::Tensor weights = values({4}).abs();
  for (const c10::IValue& weight : {none(), c10::IValue(weights)}) {
    for (int64_t reduction : {0, 1, 2}) {
      check("nll_loss_forward.", {input, target, weight, reduction, -100});
      const at::Tensor grad = reduction == 0 ? values({5}) : values({});
      const at::Tensor total = reduction == 0 ? at::zeros({}, at::kDouble) : values({}).abs();
      check("nll_loss_backward.", {grad, input, target, weight, reduction, -100, total});
    }
  }
  check("nll_loss_forward.", {input[0], target[0], none(), 2, -100});
  const at::Tensor image = values({3, 4, 2, 5}).log_softmax(1), classes = indices({3, 2, 5}, 4);
  for (const c10::IValue& weight : {none(), c10::IValue(weights)}) {
    for (int64_t reduction : {0, 1, 2}) {
      check("nll_loss2d_forward.", {image, classes, weight, reduction, -100});
      const at::Tensor grad = reduction == 0 ? values({3, 2, 5}) : values({});
      check("nll_loss2d_backward.",
            {grad, image, classes, weight, reduction, -100, values({}).abs()});
    }
  }
}

// Arguments for an elementwise operator, made after its schema: tensors of these shapes
// by turns, 2 for numbers.
Arguments elementwise_arguments(const c10::FunctionSchema& schema, at::ScalarType type,
                                const std::vector<std::vector<int64_t>>& shapes) {
  Arguments arguments;
  size_t tensors = 0;
  for (const auto& argument : schema.arguments()) {
    const bool is_optional = argument.type()->kind() == c10::TypeKind::OptionalType;
    const auto kind = (is_optional ? argument.type()->containedType(0) : argument.type())->kind();
    if (kind == c10::TypeKind::NumberType && is_optional) {
      arguments.emplace_back(c10::Scalar(0.5));
    } else if (kind == c10::TypeKind::TensorType) {
      const bool is_out = argument.kwarg_only();
      const auto& shape = shapes[is_out ? 0 : tensors++ % shapes.size()];
      const bool is_mask = argument.name() == "mask" || argument.name() == "condition";
      const at::Tensor values =
          at::rand(shape, at::kDouble).mul(type == at::kDouble ? 0.8 : 3).add(0.1);
      arguments.emplace_back(is_mask ? values.gt(0.5) : values.to(type));
    } else if (argument.default_value().has_value()) {
      arguments.push_back(*argument.default_value());
    } else if (kind == c10::TypeKind::NumberType) {
      arguments.emplace_back(c10::Scalar(2));
    } else if (kind == c10::TypeKind::BoolType) {
      arguments.emplace_back(true);
    } else if (kind == c10::TypeKind::IntType) {
      arguments.emplace_back(int64_t{1});
    } else if (kind == c10::TypeKind::FloatType) {
      arguments.emplace_back(0.5);
    } else {
      arguments.emplace_back();
    }
  }
  return arguments;
}

bool runs(const c10::OperatorHandle& op, Arguments arguments) {
  for (c10::IValue& argument : arguments)
    if (argument.isTensor()) argument = argument.toTensor().clone();
  try {
    op.callBoxed(&arguments);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

// Whether one of the dtypes and shapes suits the operator, whose strategies are then
// checked.
bool check_elementwise(const c10::OperatorHandle& op, const std::string& name) {
  bool suits = false;
  for (const auto type : {at::kDouble, at::kLong, at::kBool}) {
    for (const auto& shapes : std::vector<std::vector<std::vector<int64_t>>>{
             {{5, 3}}, {{5, 3}, {3}}, {{5, 3}, {5, 1}}, {{5, 3}, {}}, {{5, 3}, {5, 3}, {}}}) {
      auto arguments = elementwise_arguments(op.schema(), type, shapes);
      if (!runs(op, arguments)) continue;
      testing::expect_every_strategy(name, arguments);
      suits = true;
    }
    if (suits) break;
  }
  return suits;
}

// Of which the table names some overloads.
bool has_elementwise_overloads(const std::string& name) {
  const std::string base = name.substr(0, name.find('.'));
  for (const char* each : {"where", "add", "add_", "sub", "sub_", "rsub", "mul", "mul_", "div",
                           "div_", "masked_fill", "masked_fill_"})
    if (base == each) return true;
  return false;
}

TEST_F(EveryStrategy, OfElementwiseOperators) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& op_name : dispatcher.getAllOpNames()) {
    if (!op_name.name.starts_with("aten::")) continue;
    const std::string name = op_name.name.substr(6) + "." + op_name.overload_name;
    if (op_table().entries().contains(name) && !has_elementwise_overloads(name)) continue;
    const auto op = dispatcher.findSchema(op_name);
    const auto* const entry = op_table().find(name);
    if (entry == nullptr || !entry->strategy.any()) continue;
    if (!op || op->schema().returns().size() != 1) continue;
    if (op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) continue;
    EXPECT_TRUE(check_elementwise(*op, name)) << op->schema();
  }
}

TEST_F(EveryStrategy, OfVariances) {
  const std::vector<int64_t> dims = {1};
  for (const char* name :
       {"var.correction", "std.correction", "var_mean.correction", "std_mean.correction"}) {
    for (const bool keepdim : {false, true})
      check(name, {values({5, 6, 4}), dims, none(), keepdim});
  }
}

TEST_F(EveryStrategy, OfNorms) {
  const std::vector<int64_t> dims = {1};
  const at::Tensor input = values({5, 6, 4});
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (const double p : {0.0, 1.0, 2.0, 3.0, -1.0, kInfinity, -kInfinity}) {
    check("norm.Scalar", {input, p});
    check("norm.ScalarOpt_dtype", {input.to(at::kFloat), p, at::kDouble});
    for (const bool keepdim : {false, true}) {
      check("norm.ScalarOpt_dim", {input, p, dims, keepdim});
      check("norm.ScalarOpt_dim_dtype", {input.to(at::kFloat), p, dims, keepdim, at::kDouble});
      check("linalg_vector_norm.", {input, p, dims, keepdim, none()});
    }
  }
}

TEST_F(EveryStrategy, OfOtherDtypesOverTheSameBytes) {
  for (const auto dtype : {at::kLong, at::kInt, at::kShort})
    check("view.dtype", {values({5, 6, 4}), dtype});
  check("view.dtype", {values({5, 6, 4}).to(at::kInt), at::kLong});
}

TEST_F(EveryStrategy, OfCopiesInAnotherDtype) {
  for (const auto dtype : {at::kDouble, at::kFloat})
    check("_to_copy.", {values({5, 6, 4}), dtype, none(), none(), none(), false, none()});
}

TEST_F(EveryStrategy, OfTheGradientOfDropout) {
  check("native_dropout_backward.", {values({5, 3}), values({5, 3}).gt(0).to(at::kDouble), 1.25});
}

TEST_F(EveryStrategy, OfViews) {
  const at::Tensor input = values({5, 6, 4});
  check("t.", {values({5, 3})});
  check("transpose.int", {input, 0, -1});
  check("permute.", {input, std::vector<int64_t>{2, 0, -2}});
  for (const int64_t dim : {0, 1, -1}) {
    check("unsqueeze.", {input, dim});
    check("select.int", {input, dim, 1});
    check("unbind.int", {input, dim});
    check("unfold.", {input, dim, 2, 1});
    for (const int64_t step : {1, 2}) check("slice.Tensor", {input, dim, 1, -1, step});
    check("slice.Tensor", {input, dim, none(), 2, 1});
    check("slice.Tensor", {input, dim, 2, 100, 1});
    check("slice.Tensor", {input, dim, none(), none(), 1});
    check("slice.Tensor", {input, dim, 2, 2, 1});
    for (const int64_t size : {1, 2, 3, 9}) check("split.Tensor", {input, size, dim});
  }
  check("split_with_sizes.", {input, std::vector<int64_t>{2, 0, 4}, 1});
  check("split_with_sizes.", {input, std::vector<int64_t>{3, 3}, 1});
  const at::Tensor ones = values({1, 6, 1, 4});
  check("squeeze.", {ones});
  check("squeeze.dim", {ones, 2});
  check("squeeze.dim", {ones, 1});
  check("squeeze.dims", {ones, std::vector<int64_t>{0, 1, -2}});
  check("expand.", {ones, std::vector<int64_t>{2, 3, 6, -1, 4}});
  check("diagonal.", {input, 1, 0, 2});
  check("view_as_complex.", {values({5, 3, 2})});
  check("view_as_real.", {at::view_as_complex(values({5, 3, 2}))});
  for (const char* name : {"_conj.", "_neg_view."})
    check(name, {at::view_as_complex(values({5, 3, 2}))});
  check("repeat.", {values({6, 4}), std::vector<int64_t>{2, 1, 3}});
}

TEST_F(EveryStrategy, OfReshapingViews) {
  const at::Tensor input = values({4, 6, 4});
  for (const char* name : {"view.", "_unsafe_view."}) {
    for (const auto& shape : std::vector<std::vector<int64_t>>{
             {24, 4}, {4, 24}, {96}, {4, 2, 3, 4}, {4, 6, 2, 2}, {-1, 4}, {4, 3, 8}, {4, 6, 4}})
      check(name, {input, shape});
  }
  check("_reshape_alias.", {input, std::vector<int64_t>{24, 4}, std::vector<int64_t>{4, 1}});
}

TEST_F(EveryStrategy, OfReductions) {
  const at::Tensor input = values({5, 3, 2});
  check("mean.", {input, none()});
  for (const char* name : {"sum.", "prod."}) check(name, {input, none()});
  for (const char* name : {"max.", "min.", "any.", "all."}) check(name, {input});
  for (const bool keepdim : {false, true}) {
    for (const auto& dims : std::vector<std::vector<int64_t>>{{0}, {1, -1}, {}}) {
      for (const char* name : {"sum.dim_IntList", "nansum."})
        check(name, {input, dims, keepdim, none()});
      check("mean.dim", {input, dims, keepdim, none()});
      for (const char* name : {"amax.", "amin."}) check(name, {input, dims, keepdim});
      for (const char* name : {"any.dims", "all.dims"}) check(name, {input, dims, keepdim});
      check("count_nonzero.dim_IntList", {input, dims});
    }
    for (const c10::IValue& dim : {none(), c10::IValue(0), c10::IValue(-1)})
      check("aminmax.", {input, dim, keepdim});
    check("prod.dim_int", {input, 1, keepdim, none()});
    for (const char* name : {"any.dim", "all.dim"}) check(name, {input, -1, keepdim});
  }
  check("sum.dim_IntList", {input.transpose(0, 2), std::vector<int64_t>{1}, true, none()});
  check("count_nonzero.", {input, none()});
}

TEST_F(EveryStrategy, OfJoinedTensors) {
  const at::Tensor a = values({5, 6}), b = values({5, 6}), c = values({5, 3});
  for (const int64_t dim : {0, 1, -1}) {
    check("cat.", {std::vector<at::Tensor>{a, b}, dim});
    check("stack.", {std::vector<at::Tensor>{a, b}, dim});
  }
  check("cat.", {std::vector<at::Tensor>{a, c, b}, 1});
  check("cat.", {std::vector<at::Tensor>{a, at::empty({0}, at::kDouble), b}, 0});
}

TEST_F(EveryStrategy, OfReadingAndWritingAtIndices) {
  const at::Tensor input = values({5, 4, 3});
  for (const int64_t dim : {0, 1, 2}) {
    const at::Tensor at = at::tensor({2, 0, 1, 2}, at::kLong);
    check("index_select.", {input, dim, at});
    auto shape = input.sizes().vec();
    shape[static_cast<size_t>(dim)] = 4;
    for (const char* name : {"index_add.", "index_add_."})
      check(name, {input, dim, at, values(shape), 2});
    const at::Tensor once = at::tensor({2, 0}, at::kLong);
    shape[static_cast<size_t>(dim)] = 2;
    for (const char* name : {"index_copy.", "index_copy_."})
      check(name, {input, dim, once, values(shape)});
    for (const char* name : {"index_fill.int_Scalar", "index_fill_.int_Scalar"})
      check(name, {input, dim, once, 0.5});
    for (const char* name : {"index_fill.int_Tensor", "index_fill_.int_Tensor"})
      check(name, {input, dim, once, values({})});
    const at::Tensor places = indices({5, 4, 3}, 3);
    check("gather.", {input, dim, places});
    check("gather.", {input, dim, places.narrow(dim, 0, 2)});
    const at::Tensor distinct = at::argsort(values({5, 4, 3}), dim);
    for (const char* name : {"scatter.src", "scatter_.src", "scatter_add.", "scatter_add_."})
      check(name, {input, dim, distinct, values({5, 4, 3})});
    for (const char* name : {"scatter.value", "scatter_.value"})
      check(name, {input, dim, distinct.narrow(dim, 0, 2), 0.5});
  }
  using Indices = std::vector<std::optional<at::Tensor>>;
  for (const Indices& at : {Indices{std::nullopt, indices({2, 3}, 4)}, Indices{indices({6}, 5)},
                            Indices{indices({2}, 5), std::nullopt, indices({3, 2}, 3)},
                            Indices{std::nullopt, indices({2}, 4), indices({2}, 3)}}) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& each : at) list.push_back(each);
    check("index.Tensor", {input, list});
    const at::Tensor read = at::index(input, list);
    for (const char* name : {"index_put.", "index_put_."}) {
      check(name, {input, list, values(read.sizes()), true});
      check(name, {input, list, values({1}), true});
      check(name, {input, list, values(read.sizes().slice(1)), true});
    }
  }
}

TEST_F(EveryStrategy, OfGradientsOfViews) {
  const std::vector<int64_t> shape{5, 6, 3};
  for (const int64_t dim : {0, 1, -1}) {
    const at::Tensor input = values(shape);
    check("select_backward.", {values(input.select(dim, 1).sizes()), shape, dim, 1});
    check("slice_backward.", {values(input.slice(dim, 1, 3).sizes()), shape, dim, 1, 3, 1});
    check("slice_backward.", {values(input.slice(dim, 0, 3, 2).sizes()), shape, dim, 0, 3, 2});
    check("slice_backward.", {values(input.slice(dim, 2).sizes()), shape, dim, 2, 100, 1});
    check("unfold_backward.", {values(input.unfold(dim, 2, 1).sizes()), shape, dim, 2, 1});
  }
  for (const int64_t offset : {0, 1}) {
    for (const int64_t dim : {0, 1}) {
      const auto read = values(shape).diagonal(offset, dim, 2).sizes().vec();
      check("diagonal_backward.", {values(read), shape, offset, dim, 2});
    }
  }
}

TEST_F(EveryStrategy, OfCopiesAndWhatIsMadeFromATensor) {
  const at::Tensor input = values({5, 3}), turned = values({3, 5}).t();
  for (const at::Tensor& self : {input, turned}) {
    check("clone.", {self, none()});
    check("clone.", {self, static_cast<int64_t>(at::MemoryFormat::Contiguous)});
    check("_to_copy.", {self});
    for (const char* name : {"zeros_like.", "ones_like."})
      check(name, {self, none(), none(), none(), none(), none()});
    check("empty_like.", {self, none(), none(), none(), none(), none()});
    check("full_like.", {self, 2.5, none(), none(), none(), none(), none()});
    for (const auto& shape : std::vector<std::vector<int64_t>>{{5, 3}, {5, 4}, {3}, {}}) {
      for (const char* name : {"new_zeros.", "new_ones.", "new_empty."})
        check(name, {self, shape, none(), none(), none(), none()});
      check("new_empty_strided.",
            {self, shape, contiguous_strides(shape), none(), none(), none(), none()});
      check("new_full.", {self, shape, 2.5, none(), none(), none(), none()});
    }
  }
}

TEST_F(EveryStrategy, OfLossesOfElements) {
  const at::Tensor self = values({5, 3}).sigmoid(), target = values({5, 3}).sigmoid();
  for (const int64_t reduction : {at::Reduction::None, at::Reduction::Mean, at::Reduction::Sum}) {
    const at::Tensor grad = reduction == at::Reduction::None ? values({5, 3}) : values({});
    for (const at::Tensor& other : {target, values({3}), values({5, 1})}) {
      check("mse_loss.", {self, other, reduction});
      check("soft_margin_loss.", {self, other, reduction});
      for (const char* name : {"smooth_l1_loss.", "huber_loss."})
        check(name, {self, other, reduction, 0.4});
    }
    for (const char* name : {"mse_loss_backward.", "soft_margin_loss_backward."})
      check(name, {grad, self, target, reduction});
    for (const char* name : {"smooth_l1_loss_backward.", "huber_loss_backward."})
      check(name, {grad, self, target, reduction, 0.4});
    for (const c10::IValue& weight :
         {none(), c10::IValue(values({3})), c10::IValue(values({5, 1}))}) {
      check("binary_cross_entropy.", {self, target, weight, reduction});
      check("binary_cross_entropy_backward.", {grad, self, target, weight, reduction});
      for (const c10::IValue& positive : {none(), c10::IValue(values({3}))})
        check("binary_cross_entropy_with_logits.", {self, target, weight, positive, reduction});
    }
  }
}

TEST_F(EveryStrategy, OfActivations) {
  const at::Tensor self = values({5, 4});
  const auto [result, buffer] = at::log_sigmoid_forward(self);
  check("log_sigmoid_forward.", {self});
  check("log_sigmoid_backward.", {values({5, 4}), self, buffer});
  check("_prelu_kernel.", {self, values({1, 4})});
  check("_prelu_kernel_backward.", {values({5, 4}), self, values({1, 4})});
  for (const int64_t dim : {1, -1}) {
    check("glu.", {values({5, 8}), dim});
    check("glu_backward.", {values({5, 4}), values({5, 8}), dim});
  }
}

TEST_F(EveryStrategy, OfBatchNorms) {
  const at::Tensor input = values({5, 6, 2}), grad = values({5, 6, 2});
  const at::Tensor weight = values({6}), mean = values({6}), variance = values({6}).abs();
  const c10::List<bool> all({true, true, true});
  check("native_batch_norm.", {input, weight, weight, mean, variance, false, 0.1, 1e-5});
  check("native_batch_norm.", {input, none(), none(), mean, variance, false, 0.1, 1e-5});
  check("native_batch_norm.", {input, weight, weight, none(), none(), true, 0.1, 1e-5});
  const at::Tensor nothing = values({0});
  check("native_batch_norm_backward.",
        {grad, input, weight, mean, variance, nothing, nothing, false, 1e-5, all});
  check("native_batch_norm_backward.",
        {grad, input, weight, mean, variance, mean, variance.rsqrt(), false, 1e-5, all});
  const auto [result, own, rstd] =
      at::native_batch_norm(input, weight, {}, {}, {}, true, 0.1, 1e-5);
  check("native_batch_norm_backward.",
        {grad, input, weight, none(), none(), own, rstd, true, 1e-5, all});
}

TEST_F(EveryStrategy, OfGroupNorms) {
  const at::Tensor input = values({5, 6, 2}), grad = values({5, 6, 2}), weight = values({6});
  for (const int64_t groups : {1, 2, 3, 6}) {
    check("native_group_norm.", {input, weight, weight, 5, 6, 2, groups, 1e-5});
    check("native_group_norm.", {input, none(), none(), 5, 6, 2, groups, 1e-5});
    const auto [result, mean, rstd] =
        at::native_group_norm(input, weight, {}, 5, 6, 2, groups, 1e-5);
    check("native_group_norm_backward.",
          {grad, input, mean, rstd, weight, 5, 6, 2, groups, c10::List<bool>({true, true, true})});
  }
}

using Sizes = std::vector<int64_t>;

TEST_F(EveryStrategy, OfPooling) {
  for (const Sizes& shape : std::vector<Sizes>{{5, 3, 4, 6}, {3, 4, 6}}) {
    const at::Tensor self = values(shape);
    const Sizes two{2, 2}, one{1, 1}, zero{0, 0};
    const auto [greatest, at] = at::max_pool2d_with_indices(self, two, two, zero, one, false);
    check("max_pool2d_with_indices.", {self, two, two, zero, one, false});
    check("max_pool2d_with_indices_backward.",
          {values(greatest.sizes()), self, two, two, zero, one, false, at});
    check("avg_pool2d.", {self, two, two, zero, false, true, none()});
    check("avg_pool2d_backward.",
          {values(greatest.sizes()), self, two, two, zero, false, true, none()});
    const auto [adapted, where] = at::adaptive_max_pool2d(self, Sizes{3, 2});
    check("adaptive_max_pool2d.", {self, Sizes{3, 2}});
    check("adaptive_max_pool2d_backward.", {values(adapted.sizes()), self, where});
    check("_adaptive_avg_pool2d.", {self, Sizes{3, 2}});
    check("_adaptive_avg_pool2d_backward.", {values(adapted.sizes()), self});
  }
}

TEST_F(EveryStrategy, OfPoolingVolumes) {
  for (const Sizes& shape : std::vector<Sizes>{{5, 3, 4, 4, 2}, {3, 4, 4, 2}}) {
    const at::Tensor self = values(shape);
    const Sizes two{2, 2, 2}, zero{0, 0, 0}, adapted_size{3, 2, 2};
    const at::Tensor average = at::avg_pool3d(self, two);
    check("avg_pool3d.", {self, two, two, zero, false, true, none()});
    check("avg_pool3d_backward.",
          {values(average.sizes()), self, two, two, zero, false, true, none()});
    const auto [adapted, where] = at::adaptive_max_pool3d(self, adapted_size);
    check("adaptive_max_pool3d.", {self, adapted_size});
    check("adaptive_max_pool3d_backward.", {values(adapted.sizes()), self, where});
    check("_adaptive_avg_pool3d.", {self, adapted_size});
    check("_adaptive_avg_pool3d_backward.", {values(adapted.sizes()), self});
  }
}

TEST_F(EveryStrategy, OfInterpolation) {
  const auto check_both = [](const std::string& name, int64_t planes, bool has_corners) {
    const Sizes sizes(static_cast<size_t>(planes), 4), larger(static_cast<size_t>(planes), 7);
    Sizes shape{5, 3}, grown{5, 3};
    shape.insert(shape.end(), sizes.begin(), sizes.end());
    grown.insert(grown.end(), larger.begin(), larger.end());
    Arguments forward{values(shape), larger}, backward{values(grown), larger, shape};
    for (Arguments* const arguments : {&forward, &backward}) {
      if (has_corners) arguments->emplace_back(false);
      arguments->resize(arguments->size() + static_cast<size_t>(planes));
    }
    check(name + ".", forward);
    check(name + "_backward.", backward);
  };
  for (int64_t planes = 1; planes <= 3; ++planes) {
    for (const char* name : {"upsample_nearest", "_upsample_nearest_exact"})
      check_both(name + std::to_string(planes) + "d", planes, /*has_corners=*/false);
  }
  check_both("upsample_linear1d", 1, true);
  for (const char* name : {"upsample_bilinear2d", "upsample_bicubic2d", "_upsample_bilinear2d_aa",
                           "_upsample_bicubic2d_aa"})
    check_both(name, 2, true);
  check_both("upsample_trilinear3d", 3, true);
}

struct Attention {
  at::Tensor query, key, value;
  c10::IValue mask = {};
};

TEST_F(EveryStrategy, OfAttention) {
  const at::Tensor query = values({3, 4, 5, 8});
  const at::Tensor key = values({3, 4, 6, 8});
  const at::Tensor in_rows = values({3, 5, 4, 8}).transpose(1, 2);
  for (const Attention& a :
       {Attention{query, key, values({3, 4, 6, 8})}, Attention{in_rows, key, key},
        Attention{query, values({3, 2, 6, 8}), values({3, 2, 6, 8})},
        Attention{query, values({3, 1, 6, 8}), values({3, 1, 6, 8})},
        Attention{values({1, 6, 5, 8}), values({1, 3, 6, 8}), values({1, 3, 6, 8})},
        Attention{query, key, key, values({5, 6})},
        Attention{query, key, key, values({3, 1, 5, 6})},
        Attention{query, key, key, values({1, 4, 5, 6})}}) {
    check("_scaled_dot_product_flash_attention_for_cpu.",
          {a.query, a.key, a.value, 0.0, false, a.mask, none()});
    const auto [result, sums] = at::_scaled_dot_product_flash_attention_for_cpu(
        a.query, a.key, a.value, 0.0, false, a.mask.toOptional<at::Tensor>());
    check("_scaled_dot_product_flash_attention_for_cpu_backward.",
          {values(result.sizes()), a.query, a.key, a.value, result, sums, 0.0, false, a.mask,
           none()});
  }
}

struct Convolved {
  std::vector<int64_t> input, weight;
  std::vector<int64_t> stride = {1}, padding = {0}, dilation = {1};
  bool is_transposed = false;
  std::vector<int64_t> output_padding = {0};
  int64_t groups = 1;
};

TEST_F(EveryStrategy, OfConvolutions) {
  for (const Convolved& c :
       {Convolved{{3, 2, 9}, {4, 2, 3}}, Convolved{{5, 2, 9}, {4, 2, 3}, {2}, {1}, {2}},
        Convolved{{3, 4, 6, 7}, {4, 2, 3, 2}, {2, 1}, {1, 0}, {1, 1}, false, {0, 0}, 2},
        Convolved{{3, 4, 6, 7}, {4, 3, 3, 2}, {2, 2}, {1, 0}, {1, 1}, true, {1, 0}, 2}}) {
    const int64_t channels = c.is_transposed ? c.weight[1] * c.groups : c.weight[0];
    const at::Tensor input = values(c.input);
    const at::Tensor weight = values(c.weight);
    const Arguments forward{input,      weight,          values({channels}), c.stride, c.padding,
                            c.dilation, c.is_transposed, c.output_padding,   c.groups};
    check("convolution.", forward);
    const at::Tensor grad =
        values(at::convolution(input, weight, {}, c.stride, c.padding, c.dilation, c.is_transposed,
                               c.output_padding, c.groups)
                   .sizes());
    check("convolution_backward.",
          {grad, input, weight, std::vector<int64_t>{channels}, c.stride, c.padding, c.dilation,
           c.is_transposed, c.output_padding, c.groups, c10::List<bool>({true, true, true})});
  }
}

// Whether a kernel of ours runs an operator of this name, with any overload if it has
// none: the table has in-place forms that LibTorch does not.
bool is_registered(const std::string& name) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& op_name : dispatcher.getAllOpNames()) {
    const bool is_it = op_name.name == "aten::" + name.substr(0, name.find('.')) &&
                       (name.find('.') == std::string::npos ||
                        op_name.overload_name == name.substr(name.find('.') + 1));
    const auto op = dispatcher.findSchema(op_name);
    if (is_it && op && !op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd))
      return true;
  }
  return false;
}

// Runs last in its suite.
TEST_F(EveryStrategy, OfEveryOperatorWasTried) {
  const auto& checked = testing::checked_operators();
  if (checked.empty()) GTEST_SKIP() << "runs with the tests of its suite";
  for (const auto& [name, entry] : op_table().entries())
    EXPECT_TRUE(!entry.strategy.any() || checked.contains(name) || !is_registered(name)) << name;
}

}  // namespace
}  // namespace fsdp::internal
