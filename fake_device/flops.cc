#include "fake_device/flops.h"

#include "fake_device/fake_device.h"

#include <ATen/core/Tensor.h>

#include <atomic>
#include <map>
#include <string>

namespace fsdp {
namespace internal {
namespace {

std::atomic<double> flops_so_far = 0;

// Where the first of the two factors is among the arguments.
const std::map<std::string, size_t>& products() {
  static const auto& places = *new std::map<std::string, size_t>{
      {"aten::mm", 0},   {"aten::bmm", 0},    {"aten::mv", 0},
      {"aten::dot", 0},  {"aten::addmm", 1},  {"aten::addmv", 1},
      {"aten::addr", 1}, {"aten::addbmm", 1}, {"aten::baddbmm", 1},
  };
  return places;
}

}  // namespace

void count_flops(double flops) { flops_so_far += flops; }

void count_flops(const c10::FunctionSchema& schema, const std::vector<c10::IValue>& arguments) {
  const auto found = products().find(schema.name());
  if (found == products().end()) return;
  const auto& first = arguments[found->second].toTensor();
  const auto& second = arguments[found->second + 1].toTensor();
  // [.., n, k] by [.., k, m]; of addr [n] by [m]
  const bool is_outer = schema.name() == "aten::addr";
  const auto columns = is_outer ? second.numel() : second.dim() > 1 ? second.size(-1) : 1;
  count_flops(2.0 * static_cast<double>(first.numel()) * static_cast<double>(columns));
}

}  // namespace internal

double fake_flops() { return internal::flops_so_far; }

}  // namespace fsdp
