// save() and async_save(): one save at once, or the end of it on a thread of its own.
#include "checkpoint/async_save.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/io/file_writing.h"
#include "checkpoint/ranks/world.h"
#include "checkpoint/save/saving.h"
#include "device_mesh/internal/weak_registry.h"
#include "device_mesh/process_groups/dimension_groups.h"

#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

namespace fsdp::internal::checkpoint {

// The end of a save on a thread of its own. Each rank has at most one at a time, and what
// goes wrong in it is thrown by wait(), or else by the rank's next save, or else by
// destroy_process_group(), which waits for it.
class BackgroundSave {
 public:
  // Starts `work` as the calling rank's save in the background. REQUIRES:
  // finish_previous().
  static std::shared_ptr<BackgroundSave> start(std::function<void()> work);
  // Waits for the calling rank's save in the background, and throws what went wrong in it
  // unless wait() has.
  static void finish_previous();
  // The calling rank's, kept from save to save. REQUIRES: finish_previous() before its
  // use.
  static StagingBuffer& staging();

  explicit BackgroundSave(std::function<void()> work);
  BackgroundSave(const BackgroundSave&) = delete;
  ~BackgroundSave();

  bool is_done() const { return done_; }
  void wait_without_throwing();
  void wait();

 private:
  // Waits, and throws what nobody was told yet.
  void finish();
  std::exception_ptr take_unreported();

  std::mutex mutex_;  // of what follows but done_
  std::exception_ptr error_;
  bool reported_ = false;
  std::atomic<bool> done_ = false;
  std::thread thread_;  // last: it uses the others
};

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

void save(const State& state, const std::string& path, SaveOptions options) {
  Saving saving(path, options);
  saving.begin(state, [] { BackgroundSave::finish_previous(); });
  StagingBuffer unused;
  saving.take(unused, /*staged_bytes=*/0);
  saving.finish(default_world());
}

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
