#include "programs/trainer/report/training_range.h"

#include <ATen/record_function.h>

#include <utility>

namespace programs {

TrainingRange::TrainingRange(const char* what, const std::string& of) {
  auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
  if (!callbacks) return;
  range_ = std::make_unique<at::RecordFunction>(std::move(*callbacks));
  range_->before("train::" + std::string(what) + "(" + of + ")");
}

TrainingRange::~TrainingRange() = default;

}  // namespace programs
