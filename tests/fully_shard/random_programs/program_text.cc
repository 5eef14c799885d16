// A random program as text, to be read and to be told from another.
#include "tests/fully_shard/random_programs/random_program.h"

#include <sstream>

namespace fsdp::testing {
namespace {

const char* name_of(Use use) {
  constexpr const char* names[] = {"matmul", "bias", "gain", "masked", "no_grad", "unused"};
  return names[static_cast<size_t>(use)];
}

const char* name_of(Reading reading) {
  constexpr const char* names[] = {"not", "as a product", "in statistics", "by a slice"};
  return names[static_cast<size_t>(reading)];
}

const char* name_of(Dtype dtype) {
  constexpr const char* names[] = {"float", "double", "bfloat16", "half"};
  return names[static_cast<size_t>(dtype)];
}

const char* name_of(Optimizer optimizer) {
  constexpr const char* names[] = {"SGD", "SGD with momentum", "Adam", "AdamW"};
  return names[static_cast<size_t>(optimizer)];
}

const char* name_of(ProgramTransport transport) {
  constexpr const char* kNames[] = {"the test's backend", "peer memory in place",
                                    "peer memory with copies", "Gloo"};
  return kNames[static_cast<size_t>(transport)];
}

const char* name_of(ActionKind kind) {
  constexpr const char* names[] = {"train",
                                   "two forwards, one backward",
                                   "two losses of one forward, two backwards",
                                   "two forwards, then their backwards",
                                   "forward, evaluation, backward",
                                   "evaluate under no_grad",
                                   "evaluate in InferenceMode",
                                   "throw in forward",
                                   "throw in backward, zero_grad",
                                   "set_requires_gradient_sync",
                                   "set_requires_all_reduce",
                                   "freeze",
                                   "unfreeze",
                                   "write to member",
                                   "write to registry entry",
                                   "unshard",
                                   "unshard_async",
                                   "reshard",
                                   "clip_grad_norm_",
                                   "optimizer step",
                                   "zero_grad",
                                   "zero_grad in place"};
  return names[static_cast<size_t>(kind)];
}

void print_param(std::ostream& out, const ParamSpec& param) {
  out << "p" << param.id << " " << name_of(param.use) << " rows " << param.rows << " "
      << name_of(param.dtype);
  if (param.frozen) out << " frozen";
  if (param.ignored) out << " ignored";
  if (param.in_list) out << " in a ParameterList";
  if (param.penalised) out << " penalised";
  if (param.reading != Reading::kNone) out << " entry read " << name_of(param.reading);
  if (param.tied_to >= 0) out << " tied to p" << param.tied_to;
  if (param.by_columns) out << " sharded by columns";
  if (!param.weights.empty()) {
    out << " in parts as";
    for (const int weight : param.weights) out << " " << weight;
  }
  if (param.placement) out << " placed " << *param.placement;
}

void print_ids(std::ostream& out, const char* what, const std::vector<int>& ids) {
  if (ids.empty()) return;
  out << " " << what;
  for (const int id : ids) out << " n" << id;
}

void print_dtype(std::ostream& out, const char* what, const std::optional<Dtype>& dtype) {
  if (dtype) out << " " << what << "=" << name_of(*dtype);
}

void print_unit(std::ostream& out, const Node& node) {
  out << (node.joins_previous ? " unit with the one before" : " unit");
  const auto& unit = node.unit;
  if (unit.reshard_after_forward) out << " reshard_after_forward=" << *unit.reshard_after_forward;
  if (unit.to_halves) out << " to_world(2)";
  if (!unit.reshard_after_backward) out << " reshard_after_backward=0";
  if (!unit.unshard_in_backward) out << " unshard_in_backward=0";
  if (unit.divide_factor != 0) out << " divide_factor=" << unit.divide_factor;
  print_dtype(out, "param_dtype", unit.precision.param_dtype);
  print_dtype(out, "reduce_dtype", unit.precision.reduce_dtype);
  print_dtype(out, "buffer_dtype", unit.precision.buffer_dtype);
  if (unit.precision.codec)
    out << (*unit.precision.codec == Code::kMxfp8 ? " codec=mxfp8" : " codec=mxint8");
  if (unit.offload) out << " offloaded";
  if (unit.custom_gather) out << " custom_all_gather";
  if (unit.custom_reduction) out << " custom_reduce_scatter";
  print_ids(out, "forward_prefetch", unit.forward_prefetch);
  print_ids(out, "backward_prefetch", unit.backward_prefetch);
}

void print_node(std::ostream& out, const Node& node, const std::string& indent) {
  out << indent << "n" << node.id;
  if (node.is_unit) print_unit(out, node);
  if (node.calls > 1) out << " called " << node.calls << " times";
  if (node.checkpoint) out << " checkpointed";
  if (node.conditional) out << " conditional";
  if (node.no_grad) out << " under no_grad";
  if (node.has_buffer) out << " with a buffer";
  out << "\n";
  for (const auto& param : node.params) {
    out << indent << "  ";
    print_param(out, param);
    out << "\n";
  }
  for (const auto& child : node.children) print_node(out, child, indent + "  ");
}

void print_action(std::ostream& out, const Action& action) {
  out << "  " << name_of(action.kind);
  if (action.target >= 0) out << " " << action.target;
  if (runs_backward(action.kind) && !action.condition) out << " (condition false)";
  if (action.kind == ActionKind::kSetSync || action.kind == ActionKind::kSetAllReduce)
    out << " " << action.flag;
  if (action.kind == ActionKind::kClip)
    out << " to " << action.value << (action.flag ? " maximum norm" : "");
  if (action.kind == ActionKind::kWriteMember || action.kind == ActionKind::kWriteEntry)
    out << " times " << action.value;
  out << "\n";
}

}  // namespace

std::string to_string(const Program& program) {
  std::ostringstream out;
  out << "program of seed " << program.seed << ": world " << program.world;
  if (program.replicas > 1) out << " of " << program.replicas << " replicas";
  if (program.outer == Outer::kShardOptimizer) out << " that shard the optimizer";
  if (program.tensor_ranks > 0)
    out << ", " << program.tensor_ranks << " tensor-parallel ranks each";
  if (!program.sharded) out << ", not sharded";
  if (program.activations != Dtype::kFloat) out << ", activations " << name_of(program.activations);
  out << ", width " << program.width << ", " << name_of(program.optimizer) << ", over "
      << name_of(program.transport) << (program.evict ? ", evict after every operator" : "")
      << (program.deferred ? ", deferred" : "")
      << (program.prefetch_after_gradients ? ", prefetch after gradients" : "")
      << (program.weighs_entries ? ", norms of entries in evaluations" : "") << "\n";
  print_node(out, program.root, "  ");
  for (const auto& action : program.actions) print_action(out, action);
  return out.str();
}

}  // namespace fsdp::testing
