#include "fully_shard/profile.h"

#include "device_mesh/all_reduce.h"
#include "device_mesh/collectives/group.h"
#include "device_mesh/process_group.h"

#include <ATen/Context.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <exception>
#include <filesystem>
#include <set>
#include <utility>

namespace fsdp {
namespace {

namespace profiler = torch::autograd::profiler;
using torch::profiler::impl::ActivityType;

std::set<ActivityType> activities() {
  std::set<ActivityType> found = {ActivityType::CPU};
  if (at::hasCUDA()) found.insert(ActivityType::CUDA);
  return found;
}

profiler::ProfilerConfig config() {
  return profiler::ProfilerConfig(torch::profiler::impl::ProfilerState::KINETO);
}

// This rank's of all that write one.
std::string path_on_rank(const std::string& path) {
  std::filesystem::path own = path;
  const auto rank = is_process_group_initialized() ? internal::group_rank(default_process_group())
                                                   : launch_environment().rank;
  own.replace_extension(".rank" + std::to_string(rank) + own.extension().string());
  return own.string();
}

}  // namespace

Profile::Profile(std::string path, ProfileOptions options) : options_(options) {
  TORCH_CHECK_VALUE(options.first_step >= 1 && options.last_step >= options.first_step,
                    "Profile: steps ", options.first_step, " to ", options.last_step,
                    ", allowed are a first_step of 1 or more and a last_step of first_step or "
                    "more");
  const auto folder = std::filesystem::path(path).parent_path();
  TORCH_CHECK_VALUE(!path.empty() && (folder.empty() || std::filesystem::is_directory(folder)),
                    "Profile: '", path, "' is a path in no folder that is there");
  if (!options.on_every_rank && !is_rank_zero()) return;
  path_ = options.on_every_rank ? path_on_rank(path) : std::move(path);
  begin();
}

Profile::~Profile() {
  try {
    write();
  } catch (const std::exception& error) {
    TORCH_WARN("Profile: ", error.what());
  }
}

void Profile::begin() {
  if (path_.empty() || step_ != options_.first_step) return;
  profiler::prepareProfiler(config(), activities());
  profiler::enableProfiler(config(), activities());
  is_recording_ = true;
}

void Profile::write() {
  if (!std::exchange(is_recording_, false)) return;
  profiler::disableProfiler()->save(path_);
  TORCH_CHECK(std::filesystem::exists(path_), "Profile: '", path_, "' could not be written");
}

void Profile::step() {
  if (step_++ == options_.last_step) write();
  begin();
}

}  // namespace fsdp
