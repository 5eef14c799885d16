#include "tests/simulated_accelerator/boxed_kernel.h"

#include "tests/simulated_accelerator/arguments.h"
#include "tests/simulated_accelerator/current_stream.h"
#include "tests/simulated_accelerator/generators.h"
#include "tests/simulated_accelerator/host_view.h"
#include "tests/simulated_accelerator/machine.h"

#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>

#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::testing::simulated {
namespace {

using Tensors = std::vector<at::Tensor>;

Values run_on_host(const c10::OperatorHandle& op, Values arguments) {
  const PlainKernels plain;
  op.callBoxed(&arguments);
  return arguments;
}

// Those that are not arguments.
Tensors new_tensors(const c10::FunctionSchema& schema, const Values& results) {
  Tensors tensors;
  for (size_t r = 0; r < results.size(); ++r) {
    if (is_written(schema.returns()[r])) continue;
    with_tensors(results[r], [&](const at::Tensor& tensor) {
      tensors.push_back(tensor);
      return tensor;
    });
  }
  return tensors;
}

// Arguments whose tensors have the given ones' shapes, and that number everywhere.
Values filled(const Values& arguments, int64_t number) {
  Values made;
  for (const auto& argument : arguments) {
    made.push_back(with_tensors(
        argument, [number](const at::Tensor& tensor) { return filled_like(tensor, number); }));
  }
  return made;
}

// What runs on the device's stream.
struct HostCall {
  c10::OperatorHandle op;
  Values arguments;  // a generator among them is this call's own
  Tensors outputs;   // memory of the new results

  void operator()() const { store(new_tensors(op.schema(), run_on_host(op, arguments)), outputs); }

  static void store(const Tensors& values, const Tensors& outputs) {
    const PlainKernels plain;
    for (size_t i = 0; i < outputs.size(); ++i) outputs[i].copy_(values.at(i));
  }
};

class BoxedCall {
 public:
  BoxedCall(const c10::OperatorHandle& op, Values& stack)
      : op_(op),
        schema_(op.schema()),
        name_(name_of(schema_)),
        stack_(stack),
        arguments_(take_arguments(schema_, stack)),
        on_device_(arguments_.device),
        queue_(current_queue(arguments_.device.index())) {}

  void run() {
    check_supported();
    if (arguments_.has_host_tensor) wait(name_ + " with a tensor on CPU");
    if (depends_on_values()) {
      wait(name_);
      compute();
    } else if (is_random()) {
      draw();
    } else if (makes_tensors() || arguments_.has_empty_output) {
      find_shapes();
    }
    if (arguments_.has_empty_output && knows_ == Knows::kShapes) resize_outputs();
    make_results();
    launch();
  }

 private:
  // What is known of the results before the operator has run on the device.
  enum class Knows { kNothing, kShapes, kValues };

  bool is_random() const { return op_.hasTag(at::Tag::nondeterministic_seeded); }
  bool depends_on_values() const {
    if (op_.hasTag(at::Tag::data_dependent_output)) return true;
    // Of indices, only masks have results of a length that their values decide.
    const bool by_index = name_ == "aten::index.Tensor";
    return op_.hasTag(at::Tag::dynamic_output_shape) && (!by_index || arguments_.has_mask);
  }
  bool makes_tensors() const {
    for (const auto& result : schema_.returns()) {
      if (!is_written(result)) return true;
    }
    return false;
  }

  void check_supported() const {
    for (const auto& result : schema_.returns()) {
      TORCH_CHECK_NOT_IMPLEMENTED(result.alias_info() == nullptr || is_written(result), name_,
                                  " makes a view: the simulated accelerator needs a kernel of its "
                                  "own for it (fake_device/private_use/kernels.cc)");
    }
    TORCH_CHECK_NOT_IMPLEMENTED(!is_random() || arguments_.generator, name_,
                                " takes no generator: the simulated accelerator needs a kernel of "
                                "its own for it, as dropout has");
  }

  void wait(const std::string& reason) const {
    Machine::instance().host_waits_for_stream(queue_, reason);
  }

  void compute() {
    results_ = run_on_host(op_, arguments_.on_host);
    knows_ = Knows::kValues;
  }

  bool try_shapes(int64_t number) {
    shaped_ = filled(arguments_.on_host, number);
    try {
      results_ = run_on_host(op_, shaped_);
      knows_ = Knows::kShapes;
    } catch (const std::exception&) {
      return false;
    }
    return true;
  }

  void find_shapes() {
    if (try_shapes(0) || try_shapes(1)) return;
    Machine::instance().count_run_on_true_values(arguments_.device.index(), name_);
    wait(name_ + ", whose shapes need values");
    compute();
  }

  // The run for the shapes draws as many numbers as the one on the device will.
  void draw() {
    auto& argument = arguments_.on_host[*arguments_.generator];
    auto of_device = argument.isGenerator() ? argument.toGenerator()
                                            : default_generator(arguments_.device.index());
    const std::lock_guard lock(of_device.mutex());
    auto generator = cpu_generator_like(of_device);
    argument = c10::IValue(generator);
    find_shapes();
    const auto at_issue = cpu_generator_like(of_device);
    advance(of_device, generator);
    argument = c10::IValue(at_issue);
  }

  // An out= argument that had no elements.
  void resize_outputs() {
    for (size_t i = 0; i < arguments_.given.size(); ++i) {
      if (!is_written(schema_.arguments()[i]) || !arguments_.given[i].isTensor()) continue;
      const auto output = arguments_.given[i].toTensor();
      const auto shape = shaped_[i].toTensor().sizes();
      if (output.sizes() == shape) continue;
      output.resize_(shape);
      arguments_.on_host[i] = host_view(output);
      add(arguments_.accesses, writes(output));
    }
  }

  // Written arguments as they were given; all else in new memory of the current stream.
  void make_results() {
    for (size_t r = 0; r < schema_.returns().size(); ++r) {
      if (is_written(schema_.returns()[r])) {
        stack_.push_back(internal::returned_argument(schema_, arguments_.given, r));
        continue;
      }
      stack_.push_back(with_tensors(results_.at(r), [this](const at::Tensor& result) {
        auto made = at::empty_strided(result.sizes(), result.strides(),
                                      result.options().device(arguments_.device));
        add(arguments_.accesses, writes(made));
        outputs_.push_back(host_view(made));
        return made;
      }));
    }
  }

  void launch() {
    auto& machine = Machine::instance();
    if (knows_ == Knows::kValues) {
      auto values = new_tensors(schema_, results_);
      machine.launch(queue_, {name_, std::move(arguments_.accesses),
                              [values, to = outputs_] { HostCall::store(values, to); }});
      return;
    }
    machine.launch(queue_, {name_, std::move(arguments_.accesses),
                            HostCall{op_, arguments_.on_host, outputs_}});
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  std::string name_;
  Values& stack_;
  Arguments arguments_;
  c10::DeviceGuard on_device_;
  size_t queue_;
  Knows knows_ = Knows::kNothing;
  Values results_;  // on the host, with the true values or only their shapes
  Values shaped_;   // the arguments of the run for shapes
  Tensors outputs_;
};

}  // namespace

void boxed_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  BoxedCall(op, *stack).run();
}

}  // namespace fsdp::testing::simulated
