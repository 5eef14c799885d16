#include "tensor_parallel/internal/first_inputs.h"

#include "device_mesh/collectives/group.h"
#include "device_mesh/on_mesh/mesh_collectives.h"
#include "dtensor/dispatch/compare_plain.h"
#include "dtensor/dispatch/implicit_replication.h"
#include "dtensor/tensor/dtensor_impl.h"
#include "on_demand/on_demand_storage.h"
#include "tensor_parallel/internal/common_mesh.h"
#include "tensor_parallel/internal/parallel_gate.h"
#include "tensor_parallel/internal/parallel_member.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/nan_to_num.h>
#include <ATen/ops/stack.h>
#include <c10/util/Exception.h>

#include <bit>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fsdp::internal {
namespace {

constexpr int kUsesCompared = 64;   // uses of a parameter, of each kind
constexpr int kUses = 1024;         // of a parameter until its module counts as one without steps
constexpr double kRounding = 1e-3;  // of the norm: other data differ by as much as it
constexpr const char* kWhat = "comparison of the first inputs of a tensor-parallel module";

using Words = std::vector<int64_t>;

// A plain operand and its place among the operator's arguments.
struct PlainOperand {
  at::Tensor tensor;
  size_t argument;
};

bool is_compared(const at::Tensor& operand) {
  return counts_as_replicated(operand) && !operand.is_meta() &&
         OnDemandStorage::behind(operand) == nullptr;
}

std::vector<PlainOperand> plain_operands(const GateArguments& arguments) {
  std::vector<PlainOperand> found;
  const at::NoGradGuard no_grad;
  const auto look = [&found](const c10::IValue& value, size_t argument) {
    if (value.isTensor() && is_compared(value.toTensor()))
      found.push_back({value.toTensor().detach(), argument});
  };
  for (size_t i = 0; i < arguments.size(); ++i) {
    look(arguments[i], i);
    if (!GateArguments::is_list(arguments[i])) continue;
    for (const c10::IValue& element : arguments[i].toListRef()) look(element, i);
  }
  return found;
}

// Collective over the mesh.
Agreement agreed(Words words, const DeviceMesh& mesh) {
  return agree(collectives_of(mesh),
               {.words = std::move(words), .what = kWhat, .device = local_device(mesh)});
}

// Of what a difference by rounding changes little, and one of data much: the norm, and a
// sum with weights that repeat nowhere, both of the finite elements. Rounding leaves the
// others where they are.
struct InputSums {
  double weighted = 0, norm = 0;
  int64_t elements = 0;
  int64_t not_finite = 0;  // a hash of where which of them are
};

InputSums sums_of(const at::Tensor& operand) {
  if (!operand.is_floating_point()) return {};
  const at::Tensor all = operand.to(at::kDouble).flatten();
  const at::Tensor values = at::nan_to_num(all, /*nan=*/0, /*posinf=*/0, /*neginf=*/0);
  const at::Tensor weights = at::arange(1, values.numel() + 1, values.options()).mul_(0.7).sin_();
  return {.weighted = values.dot(weights).item<double>(),
          .norm = values.norm().item<double>(),
          .elements = values.numel(),
          .not_finite = hash_of_plain(at::stack({all.isposinf(), all.isneginf(), all.isnan()}))};
}

// Coordinates, from 1 on, whose numbers are not those of coordinate 0. Collective.
std::vector<int64_t> coordinates_that_differ(const at::Tensor& operand, const at::Tensor& hashes,
                                             const DeviceMesh& mesh) {
  const InputSums own = sums_of(operand);
  const at::Tensor all = agreed({std::bit_cast<int64_t>(own.weighted),
                                 std::bit_cast<int64_t>(own.norm), own.elements, own.not_finite},
                                mesh)
                             .words;
  const auto real = [&](int64_t rank, int64_t word) {
    return std::bit_cast<double>(all[rank][word].item<int64_t>());
  };
  std::vector<int64_t> differ;
  for (int64_t rank = 1; rank < mesh.size(); ++rank) {
    const double tolerance = kRounding * (real(rank, 1) + real(0, 1));
    const auto is_near = [&](int64_t word) {
      return std::abs(real(rank, word) - real(0, word)) <= tolerance;
    };
    const bool is_rounding = all[rank][2].item<int64_t>() > 0 &&
                             all[rank].slice(0, 2).equal(all[0].slice(0, 2)) && is_near(0) &&
                             is_near(1);
    if (hashes[rank].item<int64_t>() != hashes[0].item<int64_t>() && !is_rounding)
      differ.push_back(rank);
  }
  return differ;
}

std::string module_of(const std::string& path) {
  const auto dot = path.rfind('.');
  return dot == std::string::npos ? "" : path.substr(0, dot);
}

int64_t rank_at(const DeviceMesh& mesh, int64_t coordinate) {
  return mesh.ranks()[static_cast<size_t>(coordinate)];
}

// "3, 5", and "coordinate 1 (rank 3), coordinate 2 (rank 5)".
std::string ranks_text(const std::vector<int64_t>& coordinates, const DeviceMesh& mesh) {
  std::string text;
  for (const int64_t coordinate : coordinates)
    text += (text.empty() ? "" : ", ") + std::to_string(rank_at(mesh, coordinate));
  return text;
}
std::string coordinates_text(const std::vector<int64_t>& coordinates, const DeviceMesh& mesh) {
  std::string text;
  for (const int64_t coordinate : coordinates) {
    text += (text.empty() ? "coordinate " : ", coordinate ") + std::to_string(coordinate) +
            " (rank " + std::to_string(rank_at(mesh, coordinate)) + ")";
  }
  return text;
}

const std::string& name_of(const PlainOperand& operand, const c10::OperatorHandle& op) {
  return op.schema().arguments()[operand.argument].name();
}

[[noreturn]] void report_input(const c10::OperatorHandle& op, const PlainOperand& operand,
                               const std::vector<int64_t>& differ, const std::string& path,
                               const DeviceMesh& mesh) {
  TORCH_CHECK_VALUE(
      false, "tensor parallelism: module '", module_of(path), "', which reads parameter '", path,
      "' in ", op.schema().name(), ": its operand '", name_of(operand, op),
      "', a plain tensor of shape ", operand.tensor.sizes(), " here, is not the same on rank ",
      rank_at(mesh, 0), " and on rank ", ranks_text(differ, mesh), " of ", mesh,
      ". The ranks of one tensor-parallel group must be given the same batch: choose data by "
      "the other dimension, mesh[\"dp\"].local_rank(), not by the rank of the job (rank ",
      mesh.rank(), "; every rank of the group sees this error)");
}

[[noreturn]] void report_beside_activations(const c10::OperatorHandle& op,
                                            const PlainOperand& operand,
                                            const std::vector<int64_t>& differ,
                                            const DeviceMesh& mesh) {
  TORCH_CHECK_VALUE(
      false, "tensor parallelism: ", op.schema().name(), ": its operand '", name_of(operand, op),
      "', a plain tensor of shape ", operand.tensor.sizes(),
      " here beside what a tensor-parallel module computed, is not the same on ",
      coordinates_text({0}, mesh), " and on ", coordinates_text(differ, mesh), " of ", mesh,
      ". The ranks of one tensor-parallel group must be given the same targets, masks and "
      "positions: choose them by the other dimension, mesh[\"dp\"].local_rank(), not by the rank "
      "of the job. What is a rank's own belongs beside to_local() (rank ",
      mesh.rank(), "; every rank of the group sees this error)");
}

// report(operand, coordinates) where one is not the same on all ranks; those of a fake
// world have what this one has. Collective where there are operands.
template <class Report>
void compare(const std::vector<PlainOperand>& operands, const DeviceMesh& mesh,
             const Report& report) {
  if (operands.empty() || group_backend(mesh.group()) == "fake") return;
  Words hashes;
  for (const PlainOperand& operand : operands) hashes.push_back(hash_of_plain(operand.tensor));
  const Agreement said = agreed(std::move(hashes), mesh);
  if (!said.difference) return;
  for (size_t i = 0; i < operands.size(); ++i) {
    const auto differ = coordinates_that_differ(
        operands[i].tensor, said.words.select(1, static_cast<int64_t>(i)), mesh);
    if (!differ.empty()) report(operands[i], differ);
  }
}

// Of the module whose parameter this thread met last: what it computed has no style.
std::weak_ptr<FirstSteps>& steps_of_module_met() {
  thread_local std::weak_ptr<FirstSteps> steps;
  return steps;
}

// The member among the arguments that are read; null where one is written.
MemberStyle* member_among(const GateArguments& arguments, std::optional<DeviceMesh>& mesh) {
  MemberStyle* found = nullptr;
  bool writes_some = false;
  arguments.for_each([&](const at::Tensor& tensor, bool writes) {
    writes_some |= writes;
    if (found != nullptr) return;
    found = style_of(tensor);
    if (found != nullptr) mesh = mesh_of_members(spec_of(tensor).mesh());
  });
  if (found != nullptr && !computes_derivative()) steps_of_module_met() = found->steps;
  return writes_some ? nullptr : found;
}

// Experts, which are given other tokens on each rank.
bool has_own(const GateArguments& arguments) {
  bool found = false;
  arguments.for_each([&](const at::Tensor& tensor, bool) {
    const auto* const style = style_of(tensor);
    found |= style != nullptr && style->uses.is_own;
  });
  return found;
}

// Of the activations among the arguments, as compare_beside_activations() has them; none
// where nothing is to be compared.
std::optional<DeviceMesh> mesh_of_activations(const GateArguments& arguments) {
  const DeviceMesh* mesh = nullptr;
  bool is_recorded = false, is_of_the_model = true;
  arguments.for_each([&](const at::Tensor& tensor, bool writes) {
    const auto* const meta = find_meta(tensor);
    if (meta == nullptr) {
      is_of_the_model &= !writes;
      return;
    }
    is_of_the_model &= !meta->from_parameter && (mesh == nullptr || meta->spec.mesh() == *mesh);
    mesh = &meta->spec.mesh();
    is_recorded |=
        tensor.requires_grad() && tensor.unsafeGetTensorImpl()->key_set().has(kParallelKey);
  });
  if (!is_recorded || !is_of_the_model) return std::nullopt;
  return mesh_of_members(*mesh);
}

// What is no operator of LibTorch may take a DTensor's part, and a rank's own beside it;
// the operators in its body are compared.
bool reads_values(const c10::OperatorHandle& op) {
  return std::string_view(op.schema().name()).starts_with("aten::") &&
         reads_values_of_all(op.schema().name());
}

bool is_used_up(const UsesCompared& compared) {
  return (c10::GradMode::is_enabled() ? compared.recording : compared.without_graph) >=
         kUsesCompared;
}

void count_compared(UsesCompared& compared) {
  ++(c10::GradMode::is_enabled() ? compared.recording : compared.without_graph);
}

void count_use(MemberStyle& style) {
  if (++style.compared.uses == kUses) style.steps->pass();
}

}  // namespace

std::atomic<int>& FirstSteps::running() {
  static std::atomic<int> running{0};
  return running;
}

FirstSteps::~FirstSteps() { pass(); }

void FirstSteps::pass() {
  if (!has_passed_.exchange(true)) running() -= 1;
}

void FirstSteps::saw_forward() {
  if (has_backward_) pass();
}

void compare_first_inputs(const c10::OperatorHandle& op, const GateArguments& arguments) {
  std::optional<DeviceMesh> mesh;
  if (has_own(arguments)) return;
  MemberStyle* const style = member_among(arguments, mesh);
  if (style == nullptr) return compare_beside_activations(op, arguments);
  if (style->steps->has_passed()) return;
  if (computes_derivative()) return style->steps->saw_backward();
  style->steps->saw_forward();
  count_use(*style);
  if (style->steps->has_passed() || mesh->size() == 1 || is_used_up(style->compared)) return;
  const auto operands = plain_operands(arguments);
  if (operands.empty()) return;
  count_compared(style->compared);
  compare(operands, *mesh, [&](const PlainOperand& operand, const std::vector<int64_t>& differ) {
    report_input(op, operand, differ, style->path, *mesh);
  });
}

void compare_beside_activations(const c10::OperatorHandle& op, const GateArguments& arguments) {
  if (compares_plain() || computes_derivative() || !at::GradMode::is_enabled()) return;
  std::optional<DeviceMesh> mesh;
  if (has_own(arguments)) return;
  if (MemberStyle* const style = member_among(arguments, mesh)) return count_use(*style);
  const auto steps = steps_of_module_met().lock();
  if (steps == nullptr || steps->has_passed() || !steps->compares_another()) return;
  if (!reads_values(op)) return;
  mesh = mesh_of_activations(arguments);
  if (!mesh || mesh->size() == 1) return;
  const auto operands = plain_operands(arguments);
  if (operands.empty()) return;
  steps->count_compared();
  compare(operands, *mesh, [&](const PlainOperand& operand, const std::vector<int64_t>& differ) {
    report_beside_activations(op, operand, differ, *mesh);
  });
}

}  // namespace fsdp::internal
