#include "tests/on_accelerator/program.h"

#include "dtensor/dtensor.h"
#include "tests/support/thread_ranks.h"

#include <ATen/ops/full.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>

#include <memory>
#include <sstream>
#include <utility>

namespace fsdp::testing {

using simulated::World;

ProgramRank::ProgramRank(DeviceMesh mesh) : mesh_(std::move(mesh)), device_(local_device(mesh_)) {
  if (!device_.is_cpu()) side_ = simulated::open_stream(device_);
}

void ProgramRank::wait(const c10::Stream& waiter, const c10::Stream& other) const {
  c10::Event event(device_.type());
  event.record(other);
  event.block(waiter);
}

int64_t ProgramRank::host_syncs() const {
  return side_ ? simulated::counters_now(device_).host_syncs.total : 0;
}

void ProgramRank::steps(int count, const std::function<void()>& body) {
  for (int step = 0; step < count; ++step) {
    join_side();
    if (side_) wait(*side_, simulated::current_stream(device_));
    held_.clear();
    const auto before = host_syncs();
    body();
    host_syncs_of_last_step_ = host_syncs() - before;
  }
}

void ProgramRank::on_side(const std::function<void()>& body) {
  if (side_) wait(*side_, simulated::current_stream(device_));
  on_side_at_once(body);
}

void ProgramRank::on_side_at_once(const std::function<void()>& body) {
  std::optional<c10::StreamGuard> guard;
  if (side_) guard.emplace(*side_);
  body();
}

void ProgramRank::join_side() {
  if (side_) wait(simulated::current_stream(device_), *side_);
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

void ProgramRank::keep_parameters(const torch::nn::Module& module) {
  for (const auto& parameter : module.parameters())
    keep(is_dtensor(parameter) ? DTensor(parameter).full_tensor() : parameter);
}

Values ProgramRank::values() const {
  Values values;
  for (const auto& value : kept_) values.push_back(value.cpu());
  return values;
}

namespace {

void run_rank(const Program& program, ProgramRank rank, ProgramRun& run) {
  program(rank);
  rank.join_side();
  run.values[static_cast<size_t>(rank.rank())] = rank.values();
  run.host_syncs_of_last_step[static_cast<size_t>(rank.rank())] = rank.host_syncs_of_last_step();
}

ProgramRun empty_run(int64_t ranks) {
  const auto count = static_cast<size_t>(ranks);
  return {.values = std::vector<Values>(count),
          .host_syncs_of_last_step = std::vector<int64_t>(count)};
}

bool is_one_order(World& world) {
  const auto issued = world.issued();
  for (const auto& [rank, operations] : issued) {
    if (operations != issued.begin()->second) return false;
  }
  return true;
}

}  // namespace

ProgramRun run_on_cpu(const Program& program, int64_t ranks) {
  auto run = empty_run(ranks);
  run_ranks(ranks, [&](int64_t) {
    run_rank(program, ProgramRank(init_device_mesh(c10::kCPU, {ranks})), run);
  });
  return run;
}

ProgramRun run_on_devices(const Program& program, int64_t ranks,
                          const simulated::Schedule& schedule) {
  auto run = empty_run(ranks);
  const auto world = std::make_shared<World>();
  const auto body = [&](int64_t) {
    run_rank(program, ProgramRank(init_device_mesh(simulated::kDeviceType, {ranks})), run);
  };
  run.report = simulated::run_in({.schedule = schedule}, [&] {
    try {
      simulated::run_ranks_on_devices(ranks, world, body);
    } catch (const std::exception& error) {
      run.error = error.what();
    }
  });
  run.same_order = is_one_order(*world);
  return run;
}

std::vector<simulated::Schedule> schedules_of_programs() { return simulated::schedules(5); }

std::string faults_of(const ProgramRun& run, const ProgramRun& expected, int64_t host_syncs) {
  if (!run.error.empty()) return run.error.substr(0, 2000);
  std::ostringstream faults;
  for (size_t rank = 0; rank < expected.values.size(); ++rank) {
    const auto &actual = run.values[rank], &wanted = expected.values[rank];
    if (actual.size() != wanted.size()) return "another number of values";
    for (size_t i = 0; i < wanted.size(); ++i) {
      if (!actual[i].equal(wanted[i])) faults << "value " << i << " of rank " << rank << "\n";
    }
    const auto syncs = run.host_syncs_of_last_step[rank];
    if (syncs != host_syncs) faults << syncs << " host syncs on rank " << rank << "\n";
  }
  for (const auto& pair : run.report.unordered) faults << "unordered: " << pair << "\n";
  for (const auto& failure : run.report.failures) faults << "failure: " << failure << "\n";
  if (!run.same_order) faults << "ranks issued collectives in different orders\n";
  return faults.str();
}

}  // namespace fsdp::testing
