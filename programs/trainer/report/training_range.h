// A range that profilers see: "train::step(7)", "train::phase(forward)". The page of a
// run (page/trace.h) reads them.
//
//   const TrainingRange range("phase", "forward");
#pragma once

#include <memory>
#include <string>

namespace at {
struct RecordFunction;
}

namespace programs {

// Costs nothing where nobody looks.
class TrainingRange {
 public:
  TrainingRange(const char* what, const std::string& of);
  ~TrainingRange();
  TrainingRange(const TrainingRange&) = delete;
  TrainingRange& operator=(const TrainingRange&) = delete;

 private:
  std::unique_ptr<at::RecordFunction> range_;  // null where nobody looks
};

}  // namespace programs
