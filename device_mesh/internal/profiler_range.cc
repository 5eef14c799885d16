#include "device_mesh/internal/profiler_range.h"

#include <ATen/record_function.h>

#include <utility>

namespace fsdp::internal {
namespace {

std::string name_of(const char* what, const std::string& of) {
  return "fsdp::" + std::string(what) + "(" + of + ")";
}

}  // namespace

ProfilerRange::ProfilerRange(const char* what, const std::string& of) : range_(range_if_watched()) {
  if (range_) range_->before(name_of(what, of));
}

ProfilerRange::ProfilerRange(const char* what, const std::string& of, int64_t bytes)
    : range_(range_if_watched()) {
  if (range_) begin(what, of, bytes);
}

ProfilerRange::~ProfilerRange() = default;

std::unique_ptr<at::RecordFunction> ProfilerRange::range_if_watched() {
  auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
  return callbacks ? std::make_unique<at::RecordFunction>(std::move(*callbacks)) : nullptr;
}

void ProfilerRange::begin(const char* what, const std::string& of, int64_t bytes) {
  range_->before(name_of(what, of) + " " + std::to_string(bytes) + " bytes");
}

}  // namespace fsdp::internal
