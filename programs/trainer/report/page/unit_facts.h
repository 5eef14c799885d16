// A unit of a model, as the page of a run needs it.
#pragma once

#include <cstdint>
#include <string>

namespace programs::run_report {

struct UnitFacts {
  std::string name;  // as ranges call it: "(root)"
  bool is_root = false;
  int64_t parameters = 0;      // how many tensors
  int64_t bytes = 0;           // unsharded and padded, in the dtype that modules compute with
  int64_t gradient_bytes = 0;  // of the trainable ones, in the wider dtype of gradients
};

}  // namespace programs::run_report
