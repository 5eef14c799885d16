#include "checkpoint/save/background_save.h"

#include "checkpoint/ranks/world.h"
#include "device_mesh/internal/weak_registry.h"
#include "device_mesh/process_groups/dimension_groups.h"

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <utility>

namespace fsdp::internal::checkpoint {
namespace {

// What a rank, which may be a thread, keeps between its saves. Known by the default
// process group, and gone with it.
struct RankSaves {
  std::shared_ptr<BackgroundSave> last = nullptr;
  StagingBuffer staging = {};
};

RankSaves& saves_of_this_rank() {
  static auto& of_groups =
      *new WeakKeyMap<c10::weak_intrusive_ptr<c10d::ProcessGroup>, RankSaves>();
  static auto& alone = *new RankSaves();  // of a world of one
  of_groups.sweep();
  const auto group = default_world().group;
  if (!group) return alone;
  return of_groups.with(*group, [](RankSaves& saves) -> RankSaves& { return saves; });
}

}  // namespace

std::shared_ptr<BackgroundSave> BackgroundSave::start(std::function<void()> work) {
  auto save = std::make_shared<BackgroundSave>(std::move(work));
  if (const auto groups = default_dimension()) {
    groups->before_shut_down("checkpoint", [save] { save->finish(); });
  }
  return saves_of_this_rank().last = std::move(save);
}

void BackgroundSave::finish_previous() {
  if (const auto last = std::exchange(saves_of_this_rank().last, nullptr)) last->finish();
}

void BackgroundSave::finish() {
  wait_without_throwing();
  if (const auto error = take_unreported()) std::rethrow_exception(error);
}

StagingBuffer& BackgroundSave::staging() { return saves_of_this_rank().staging; }

BackgroundSave::BackgroundSave(std::function<void()> work)
    : thread_([this, work = std::move(work)]() mutable {
        std::exception_ptr error;
        try {
          work();
        } catch (...) {
          error = std::current_exception();
        }
        work = nullptr;  // what it holds ends here
        const std::lock_guard lock(mutex_);
        error_ = error;
        done_ = true;
      }) {}

BackgroundSave::~BackgroundSave() { wait_without_throwing(); }

void BackgroundSave::wait_without_throwing() {
  if (thread_.joinable()) thread_.join();
}

void BackgroundSave::wait() {
  wait_without_throwing();
  const std::lock_guard lock(mutex_);
  reported_ = true;
  if (error_) std::rethrow_exception(error_);
}

std::exception_ptr BackgroundSave::take_unreported() {
  const std::lock_guard lock(mutex_);
  return std::exchange(reported_, true) ? nullptr : error_;
}

}  // namespace fsdp::internal::checkpoint
