#include "device_mesh/internal/profiler_range.h"

#include <ATen/record_function.h>

#include <utility>

namespace fsdp::internal {
namespace {

std::string name_of(const char* what, const std::string& of) {
  return "fsdp::" + std::string(what) + "(" + of + ")";
}

}  // namespace

ProfilerRange::ProfilerRange() {
  auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
  if (callbacks) range_ = std::make_unique<at::RecordFunction>(std::move(*callbacks));
}

ProfilerRange::ProfilerRange(const char* what, const std::string& of) : ProfilerRange() {
  if (range_) range_->before(name_of(what, of));
}

ProfilerRange::ProfilerRange(const char* what, const std::string& of, int64_t bytes)
    : ProfilerRange() {
  if (range_) begin(what, of, bytes);
}

ProfilerRange::~ProfilerRange() = default;

void ProfilerRange::begin(const char* what, const std::string& of, int64_t bytes) {
  range_->before(name_of(what, of) + " " + std::to_string(bytes) + " bytes");
}

}  // namespace fsdp::internal
