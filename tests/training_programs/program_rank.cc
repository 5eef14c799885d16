#include "tests/training_programs/program_rank.h"

#include "dtensor/dtensor.h"
#include "tests/support/thread_ranks.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

namespace fsdp::testing {

ProgramRank::ProgramRank(DeviceMesh mesh, ProgramHooks hooks)
    : mesh_(std::move(mesh)), hooks_(std::move(hooks)), device_(local_device(mesh_)) {
  if (!device_.is_cpu())
    side_ = c10::impl::VirtualGuardImpl(device_.type()).getNewStream(device_, /*priority=*/0);
}

c10::Stream ProgramRank::current_stream() const {
  return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
}

void ProgramRank::wait(const c10::Stream& waiter, const c10::Stream& other) const {
  c10::Event event(device_.type());
  event.record(other);
  event.block(waiter);
}

void ProgramRank::steps(int count, const std::function<void()>& body) {
  for (int step = 0; step < count; ++step) {
    join_side();
    if (side_) wait(*side_, current_stream());
    held_.clear();
    const auto before = hooks_.host_syncs();
    body();
    host_syncs_of_last_step_ = hooks_.host_syncs() - before;
  }
}

void ProgramRank::on_side(const std::function<void()>& body) {
  if (side_) wait(*side_, current_stream());
  on_side_at_once(body);
}

void ProgramRank::on_side_at_once(const std::function<void()>& body) {
  {
    std::optional<c10::StreamGuard> guard;
    if (side_) guard.emplace(*side_);
    hooks_.before_side();
    body();
  }
  hooks_.after_side();
}

void ProgramRank::join_side() {
  if (side_) wait(current_stream(), *side_);
}

at::Tensor ProgramRank::hold(const at::Tensor& tensor) {
  held_.push_back(tensor);
  return tensor;
}

void ProgramRank::allocate_much() {
  const c10::NoGradGuard no_grad;
  for (int64_t elements = 16; elements <= 4096; elements *= 2) {
    std::vector<at::Tensor> blocks;
    for (int i = 0; i < 3; ++i) blocks.push_back(at::full({elements}, 3, device_));
    keep(blocks[0] + blocks[1] * blocks[2]);
  }
}

void ProgramRank::keep(const at::Tensor& value) {
  kept_.push_back((is_dtensor(value) ? DTensor(value).full_tensor() : value).detach());
}

void ProgramRank::keep_parameters(const torch::nn::Module& module) {
  for (const auto& parameter : module.parameters()) keep(parameter);
}

void ProgramRank::keep_gradients(const torch::nn::Module& module) {
  for (const auto& parameter : module.parameters())
    keep(parameter.grad().defined() ? parameter.grad() : at::zeros({0}));
}

Values ProgramRank::values() {
  join_side();
  Values values;
  for (const auto& value : kept_) values.push_back(value.cpu());
  return values;
}

std::vector<Values> run_on_cpu(const TrainingProgram& program, int64_t ranks) {
  std::vector<Values> values(static_cast<size_t>(ranks));
  run_ranks(ranks, [&](int64_t index) {
    ProgramRank rank(init_device_mesh(c10::kCPU, {ranks}));
    program(rank);
    values[static_cast<size_t>(index)] = rank.values();
  });
  return values;
}

}  // namespace fsdp::testing
