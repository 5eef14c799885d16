#include "tensor_parallel/internal/first_inputs.h"

#include "device_mesh/on_mesh/collectives_of.h"
#include "dtensor/internal/compare_plain.h"
#include "dtensor/internal/dtensor_impl.h"
#include "on_demand/on_demand_storage.h"
#include "tensor_parallel/internal/parallel_gate.h"
#include "tensor_parallel/internal/parallel_member.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <c10/util/Exception.h>

#include <bit>
#include <cmath>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::internal {
namespace {

constexpr int kUsesRecording = 64, kUsesWithoutGraph = 1;
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
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].isTensor() && is_compared(arguments[i].toTensor()))
      found.push_back({arguments[i].toTensor().detach(), i});
  }
  return found;
}

// Collective over the mesh.
Agreement agreed(Words words, const DeviceMesh& mesh) {
  return agree(collectives_of(mesh),
               {.words = std::move(words), .what = kWhat, .device = local_device(mesh)});
}

// Of what a difference by rounding changes little, and one of data much: the norm, and a
// sum with weights that repeat nowhere.
struct Numbers {
  double weighted = 0, norm = 0;
  int64_t elements = 0;
};

Numbers numbers_of(const at::Tensor& operand) {
  if (!operand.is_floating_point()) return {};
  const at::Tensor values = operand.to(at::kDouble).flatten();
  const at::Tensor weights = at::arange(values.numel(), values.options()).mul_(0.7).sin_();
  return {.weighted = values.dot(weights).item<double>(),
          .norm = values.norm().item<double>(),
          .elements = values.numel()};
}

// Coordinates, from 1 on, whose numbers are not those of coordinate 0. Collective.
std::vector<int64_t> coordinates_that_differ(const at::Tensor& operand, const at::Tensor& hashes,
                                             const DeviceMesh& mesh) {
  const Numbers own = numbers_of(operand);
  const at::Tensor all =
      agreed({std::bit_cast<int64_t>(own.weighted), std::bit_cast<int64_t>(own.norm), own.elements},
             mesh)
          .words;
  const auto real = [&](int64_t rank, int64_t word) {
    return std::bit_cast<double>(all[rank][word].item<int64_t>());
  };
  std::vector<int64_t> differ;
  for (int64_t rank = 1; rank < mesh.size(); ++rank) {
    const bool is_rounding =
        all[rank][2].item<int64_t>() > 0 && all[rank][2].equal(all[0][2]) &&
        std::abs(real(rank, 0) - real(0, 0)) <= kRounding * (real(rank, 1) + real(0, 1));
    if (hashes[rank].item<int64_t>() != hashes[0].item<int64_t>() && !is_rounding)
      differ.push_back(rank);
  }
  return differ;
}

std::string module_of(const std::string& path) {
  const auto dot = path.rfind('.');
  return dot == std::string::npos ? "" : path.substr(0, dot);
}

[[noreturn]] void report(const c10::OperatorHandle& op, const PlainOperand& operand,
                         const std::vector<int64_t>& differ, const std::string& path,
                         const DeviceMesh& mesh) {
  std::ostringstream ranks;
  for (const int64_t coordinate : differ)
    ranks << (ranks.tellp() == 0 ? "" : ", ") << mesh.ranks()[static_cast<size_t>(coordinate)];
  TORCH_CHECK_VALUE(
      false, "tensor parallelism: module '", module_of(path), "', which reads parameter '", path,
      "' in ", op.schema().name(), ": its operand '",
      op.schema().arguments()[operand.argument].name(), "', a plain tensor of shape ",
      operand.tensor.sizes(), " here, is not the same on rank ", mesh.ranks()[0], " and on rank ",
      ranks.str(), " of ", mesh,
      ". The ranks of one tensor-parallel group must be given the same batch: choose data by "
      "the other dimension, mesh[\"dp\"].local_rank(), not by the rank of the job (rank ",
      mesh.rank(), "; every rank of the group sees this error)");
}

// The member among the arguments that are read; null where one is written.
MemberStyle* member_among(const GateArguments& arguments, DeviceMesh const** mesh) {
  MemberStyle* found = nullptr;
  bool writes_some = false;
  arguments.for_each([&](const at::Tensor& tensor, bool writes) {
    writes_some |= writes;
    if (found != nullptr) return;
    found = style_of(tensor);
    if (found != nullptr) *mesh = &spec_of(tensor).mesh();
  });
  return writes_some ? nullptr : found;
}

bool is_used_up(UsesCompared& compared) {
  return c10::GradMode::is_enabled() ? compared.recording++ >= kUsesRecording
                                     : compared.without_graph++ >= kUsesWithoutGraph;
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
  const DeviceMesh* mesh = nullptr;
  MemberStyle* const style = member_among(arguments, &mesh);
  if (style == nullptr || style->steps->has_passed()) return;
  if (computes_derivative()) return style->steps->saw_backward();
  style->steps->saw_forward();
  if (style->steps->has_passed() || mesh->size() == 1) return;
  const auto operands = plain_operands(arguments);
  if (operands.empty() || is_used_up(style->compared)) return;
  Words hashes;
  for (const PlainOperand& operand : operands) hashes.push_back(hash_of_plain(operand.tensor));
  const Agreement said = agreed(std::move(hashes), *mesh);
  if (!said.difference) return;
  for (size_t i = 0; i < operands.size(); ++i) {
    const auto differ = coordinates_that_differ(
        operands[i].tensor, said.words.select(1, static_cast<int64_t>(i)), *mesh);
    if (!differ.empty()) report(op, operands[i], differ, style->path, *mesh);
  }
}

}  // namespace fsdp::internal
