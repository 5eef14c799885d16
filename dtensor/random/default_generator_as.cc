#include "dtensor/random/default_generator_as.h"

#include "dtensor/random/thread_generators.h"

#include <ATen/Context.h>

#include <utility>

namespace fsdp::internal {

DefaultGeneratorAs::DefaultGeneratorAs(at::Generator generator)
    : generator_(std::move(generator)),
      default_(at::globalContext().defaultGenerator(generator_.device())),
      before_(generator_state(default_)) {
  set_generator_state(default_, generator_state(generator_));
}

DefaultGeneratorAs::~DefaultGeneratorAs() {
  set_generator_state(generator_, generator_state(default_));
  set_generator_state(default_, before_);
}

}  // namespace fsdp::internal
