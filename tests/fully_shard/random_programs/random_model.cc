#include "tests/fully_shard/random_programs/random_model.h"

#include "fully_shard/deferred_init.h"
#include "tests/support/default_generator.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/container/parameterlist.h>

#include <mutex>
#include <utility>

namespace fsdp::testing {
namespace {

using at::Tensor;
using Region = std::function<Tensor(const Tensor&)>;

struct RegionHolder : torch::CustomClassHolder {
  explicit RegionHolder(Region r) : region(std::move(r)) {}
  Region region;
};

// Activation checkpointing as users write it: nothing is saved but the input; backward
// runs the region again.
struct Checkpoint : torch::autograd::Function<Checkpoint> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x,
                        const Region& region) {
    context->save_for_backward({x});
    context->saved_data["region"] =
        at::IValue::make_capsule(c10::make_intrusive<RegionHolder>(region));
    return region(x);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto x = context->get_saved_variables()[0].detach().requires_grad_();
    const auto holder =
        c10::static_intrusive_pointer_cast<RegionHolder>(context->saved_data["region"].toCapsule());
    at::AutoGradMode enable(true);
    torch::autograd::backward({holder->region(x)}, {gradients[0]});
    return {x.grad(), Tensor()};
  }
};

// From a seed of its own, so that it stays what it is when others are removed.
Tensor make_tensor(const Program& program, const ParamSpec& param) {
  at::manual_seed(1000 * program.seed + static_cast<uint64_t>(param.id));
  std::vector<int64_t> shape{rows_of(program, param)};
  if (param.use == Use::kMatmul) shape.push_back(program.width);
  const auto values = at::randn(shape, at::kFloat) * 0.5;
  return values.to(scalar_type(param.dtype)).set_requires_grad(!param.frozen);
}

// For sums of more precision than what they are rounded to: in which order the ranks'
// parts are added up then shows nowhere. The product is of the member's dtype, where an
// entry's own is double already and its member's is not.
Tensor in_double(const Tensor& tensor) { return (tensor * 1).to(at::kDouble); }

Tensor sum_of(const Tensor& tensor) { return in_double(tensor).sum(); }

Tensor sum_of_squares(const Tensor& tensor) {
  const auto precise = in_double(tensor);
  return (precise * precise).sum();
}

Tensor statistics_of(const Tensor& tensor) {
  const auto precise = in_double(tensor);
  const auto norm = precise.norm();
  return tensor.numel() == 0 ? norm : norm + precise.mean() + precise.abs().max();
}

}  // namespace

std::shared_ptr<const GatherCodec> codec_of(const PrecisionSpec& precision,
                                            const at::Tensor& parameter) {
  // A row of one element has no smaller code.
  if (!precision.codec || parameter.dim() != 2 || parameter.size(1) < 2) return nullptr;
  return *precision.codec == Code::kMxfp8 ? mxfp8() : mxint8();
}

at::ScalarType scalar_type(Dtype dtype) {
  switch (dtype) {
    case Dtype::kDouble:
      return at::kDouble;
    case Dtype::kBFloat16:
      return at::kBFloat16;
    case Dtype::kHalf:
      return at::kHalf;
    default:
      return at::kFloat;
  }
}

class RandomBlock : public torch::nn::Module {
 public:
  RandomBlock(const Program& program, const Node& node, RandomModel& model)
      : node_(node), dtype_(scalar_type(program.activations)) {
    for (const auto& param : node.params) {
      auto& tensor = model.tensors[tensor_of(program, param).id];
      if (!tensor.member.defined()) tensor.member = make_tensor(program, tensor_of(program, param));
      const auto [holder, key] = add(param, tensor.member);
      slots_.push_back({tensor.member, holder, key, tensor.input_cast});
      if (tensor.holder == nullptr) tensor = slots_.back();
    }
    if (node.has_buffer) {
      at::manual_seed(1000 * program.seed + 500 + static_cast<uint64_t>(node.id));
      buffer_ = register_buffer("buffer", at::randn({program.width}, at::kFloat));
    }
    for (const auto& child : node.children) {
      const auto block = std::make_shared<RandomBlock>(program, child, model);
      children_.push_back(register_module("n" + std::to_string(child.id), block));
      model.blocks[child.id] = block;
    }
  }

  Tensor forward(const Tensor& x, const Forward& forward) {
    if (node_.conditional && !forward.condition) return x;
    if (node_.no_grad) {
      Tensor y;
      {
        at::NoGradGuard no_grad;
        y = calls(x, forward);
      }
      return x + y;
    }
    if (!node_.checkpoint || !at::GradMode::is_enabled() || !x.requires_grad())
      return calls(x, forward);
    return Checkpoint::apply(
        x, Region([this, forward](const Tensor& input) { return calls(input, forward); }));
  }

 private:
  std::pair<torch::nn::Module*, std::string> add(const ParamSpec& param, const Tensor& tensor) {
    if (!param.in_list) {
      const auto name = "p" + std::to_string(param.id);
      register_parameter(name, tensor, tensor.requires_grad());
      return {this, name};
    }
    if (list_.is_empty()) list_ = register_module("list", torch::nn::ParameterList());
    list_->append(tensor);
    return {list_.ptr().get(), std::to_string(list_->size() - 1)};
  }

  Tensor calls(Tensor x, const Forward& forward) {
    for (int i = 0; i < node_.calls; ++i) x = once(std::move(x), forward);
    if (forward.throw_backward_at == node_.id && x.requires_grad()) {
      x.register_hook([](const Tensor&) -> Tensor { throw PlannedException(); });
    }
    return x;
  }

  Tensor once(Tensor x, const Forward& forward) {
    if (buffer_.defined()) x = (x + buffer_).to(dtype_);
    for (size_t i = 0; i < slots_.size(); ++i)
      x = use(std::move(x), node_.params[i], slots_[i], forward);
    if (forward.throw_at == node_.id) throw PlannedException();
    for (const auto& child : children_) x = child->forward(x, forward);
    return x;
  }

  // The parameters of a list have no other handle. Where nothing is recorded for an
  // entry, what operators make of it alone is a DTensor, until plain tensors meet that.
  static Tensor fetch(const ModelTensor& slot, bool through_registry) {
    return through_registry ? slot.entry() : slot.member;
  }
  // For operators that have it alone: these DTensors are of the entry's own dtype, so it
  // is the member where units cast.
  static Tensor fetch_alone(const ModelTensor& slot, bool through_registry) {
    if (!through_registry) return slot.member;
    const auto entry = slot.entry();
    const bool records = at::GradMode::is_enabled() && entry.requires_grad();
    return records || *slot.input_cast == InputCast::kNone ? entry : slot.member;
  }

  static Tensor input_of(const Tensor& x, const ModelTensor& slot) {
    return *slot.input_cast == InputCast::kByModel ? x.to(slot.member.scalar_type()) : x;
  }
  // For an operator that promotes no dtypes.
  static Tensor input_in_dtype(const Tensor& x, const ModelTensor& slot) {
    return *slot.input_cast == InputCast::kByPolicy ? x : x.to(slot.member.scalar_type());
  }

  Tensor use(Tensor x, const ParamSpec& param, const ModelTensor& slot,
             const Forward& forward) const {
    if (param.penalised) x = x + 0.01 * sum_of_squares(fetch_alone(slot, true)).to(dtype_);
    if (!at::GradMode::is_enabled()) x = read_entry(std::move(x), param.reading, slot);
    if (param.use == Use::kUnused) return x;
    if (param.use == Use::kMatmul) {
      const auto p = fetch(slot, param.in_list);
      return x + 0.3 * input_in_dtype(x, slot).matmul(p.t()).tanh().matmul(p).to(dtype_);
    }
    if (param.use == Use::kBias) return (input_of(x, slot) + fetch(slot, param.in_list)).to(dtype_);
    const auto p = fetch_alone(slot, param.in_list);
    switch (param.use) {
      case Use::kGain:
        return x *
               (1 +
                0.05 * sum_of_squares(p).to(dtype_).tanh());  // bounded: training must not diverge
      case Use::kMasked:
        return x + (mask(forward.rank + param.id, x) * sum_of(p)).to(dtype_);
      case Use::kNoGrad: {
        Tensor offset;
        {
          at::NoGradGuard no_grad;
          offset = 0.01 * sum_of_squares(fetch_alone(slot, param.in_list)).to(dtype_);
        }
        return x + offset;
      }
      default:
        return x;
    }
  }

  // A tensor beside `x`: numbers that parts are computed with are to be the same on all
  // ranks.
  static Tensor mask(int64_t number, const Tensor& x) {
    const auto options = at::TensorOptions(at::kDouble).device(x.device());
    return at::scalar_tensor(static_cast<double>(number % 2), options);
  }

  Tensor read_entry(Tensor x, Reading reading, const ModelTensor& slot) const {
    if (reading == Reading::kNone) return x;
    const auto p = slot.entry();
    if (reading == Reading::kStatistics) return x * (1 + 0.05 * statistics_of(p).tanh()).to(dtype_);
    const auto read = reading == Reading::kProduct ? p : p.narrow(0, 0, (p.size(0) + 1) / 2);
    if (p.dim() == 2) {
      const auto weight = reading == Reading::kProduct ? read * 1 : read;
      const auto hidden = at::linear(x.to(weight.scalar_type()), weight).tanh();
      return x + 0.1 * hidden.matmul(weight).to(dtype_);
    }
    return x + 0.1 * sum_of(reading == Reading::kProduct ? x.mean() * read : read).to(dtype_);
  }

  Node node_;
  at::ScalarType dtype_;            // of activations
  std::vector<ModelTensor> slots_;  // one per parameter of the node
  Tensor buffer_;
  std::vector<std::shared_ptr<RandomBlock>> children_;
  torch::nn::ParameterList list_{nullptr};
};

Tensor ModelTensor::entry() const { return holder->named_parameters(/*recurse=*/false)[key]; }

Tensor RandomModel::forward(const Tensor& x, const Forward& forward) const {
  return root->forward(x, forward);
}

torch::nn::Module& RandomModel::module() const { return *root; }

RandomModel build_model(const Program& program) {
  const std::scoped_lock lock(default_generator_in_use);
  RandomModel model;
  model.root = std::make_shared<RandomBlock>(program, program.root, model);
  model.blocks[program.root.id] = model.root;
  return model;
}

RandomModel build_deferred(const Program& program) {
  return deferred_init([&] { return build_model(program); });
}

}  // namespace fsdp::testing
