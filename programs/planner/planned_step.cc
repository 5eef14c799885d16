#include "programs/planner/planned_step.h"

#include "device_mesh/process_group.h"
#include "fake_device/fake_device.h"
#include "programs/trainer/setup/sharded_model.h"

namespace programs {
namespace {

// The process group of a world that is not there, while it lives.
class FakeWorld {
 public:
  explicit FakeWorld(const PlannedJob& job) {
    fsdp::init_process_group({.backend = "fake", .rank = job.rank, .world_size = job.ranks});
  }
  ~FakeWorld() { fsdp::destroy_process_group(); }
  FakeWorld(const FakeWorld&) = delete;
};

DeviceCounters counters_of_fake_device() {
  return {.memory = [] { return fsdp::fake_memory().now; },
          .peak = [] { return fsdp::fake_memory().peak; },
          .reset_peak = [] { fsdp::reset_fake_peak(); },
          .flops = [] { return fsdp::fake_flops(); }};
}

Transformer make_fake_model(const TrainingOptions& options) {
  const fsdp::OnFakeDevice here;
  return Transformer(options.model);
}

}  // namespace

MeasuredStep plan_step(TrainingOptions options, const PlannedJob& job) {
  fsdp::install_fake_device();
  options.device = fsdp::kFakeDevice;
  const FakeWorld world(job);
  return measure_step([&] { return make_fake_model(options); }, options,
                      mesh_of(options, job.ranks), counters_of_fake_device());
}

}  // namespace programs
