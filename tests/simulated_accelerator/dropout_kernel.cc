#include "tests/simulated_accelerator/current_stream.h"
#include "tests/simulated_accelerator/generators.h"
#include "tests/simulated_accelerator/host_view.h"
#include "tests/simulated_accelerator/kernels.h"
#include "tests/simulated_accelerator/machine.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones.h>
#include <torch/library.h>

#include <mutex>
#include <tuple>
#include <utility>

namespace fsdp::testing::simulated {
namespace {

// What is kept, scaled, as dropout() on CPU has it. Drawn when the operator is issued: it
// depends on no memory of the device.
at::Tensor draw_noise(const at::Tensor& input, double p) {
  const PlainKernels plain;
  auto noise = at::ones(input.sizes(), input.options().device(c10::kCPU));
  if (p == 0) return noise;
  if (p == 1) return noise.zero_();
  auto generator = default_generator(input.device().index());
  const std::lock_guard lock(generator.mutex());
  const auto cpu_generator = cpu_generator_like(generator);
  noise.bernoulli_(1 - p, cpu_generator).div_(1 - p);
  advance(generator, cpu_generator);
  return noise;
}

// dropout() asks an accelerator for this operator, where it composes others on CPU; and
// the kernel that CPU has for it draws from the CPU's own generator.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p,
                                                  std::optional<bool> train) {
  const auto noise = draw_noise(input, train.value_or(true) ? p : 0);
  auto output = at::empty_like(input);
  auto mask = at::empty_like(input, input.options().dtype(c10::kBool));
  auto accesses = reads(input);
  add(accesses, writes(output));
  add(accesses, writes(mask));
  Machine::instance().launch(
      current_queue(input.device().index()),
      {"aten::native_dropout", std::move(accesses),
       [noise, from = host_view(input), to = host_view(output), kept = host_view(mask)] {
         const PlainKernels plain;
         to.copy_(from.mul(noise));
         kept.copy_(noise.ne(0));
       }});
  return {output, mask};
}

}  // namespace

void register_dropout_kernel(torch::Library& library) {
  library.impl("native_dropout", &native_dropout);
}

}  // namespace fsdp::testing::simulated
