#include "checkpoint/async_save.h"

#include "checkpoint/save/background_save.h"
#include "checkpoint/save/saving.h"
#include "device_mesh/process_groups/dimension_groups.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <utility>

namespace fsdp {
namespace {

using namespace internal::checkpoint;  // NOLINT: this file is its front

// The same ranks over a group that only saves in the background use.
World background_world() {
  World world = default_world();
  if (!world.group) return world;
  const auto side = internal::default_dimension()->side_group("checkpoint");
  world.group = std::make_shared<const internal::Group>(side);
  return world;
}

}  // namespace

SaveHandle::SaveHandle(std::shared_ptr<BackgroundSave> save) : save_(std::move(save)) {}

SaveHandle& SaveHandle::operator=(SaveHandle&& other) noexcept {
  if (save_ && save_ != other.save_) save_->wait_without_throwing();
  save_ = std::move(other.save_);
  return *this;
}

SaveHandle::~SaveHandle() {
  if (save_) save_->wait_without_throwing();
}

bool SaveHandle::is_done() const { return !save_ || save_->is_done(); }

void SaveHandle::wait() {
  if (save_) save_->wait();
}

SaveHandle async_save(const State& state, const std::string& path, SaveOptions options,
                      AsyncOptions async) {
  auto saving = std::make_shared<Saving>(path, options);
  saving->begin(state, [&] {
    BackgroundSave::finish_previous();
    TORCH_CHECK_VALUE(async.staging_bytes >= 0, "AsyncOptions::staging_bytes is ",
                      async.staging_bytes, "; it must be 0 or more");
  });
  const World world = background_world();
  saving->take(BackgroundSave::staging(), async.staging_bytes);
  return SaveHandle(
      BackgroundSave::start([saving = std::move(saving), world] { saving->finish(world); }));
}

}  // namespace fsdp
