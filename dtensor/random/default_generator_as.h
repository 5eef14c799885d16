// For operators that draw from a device's default generator and take no other.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

namespace fsdp::internal {

// While it lives, the default generator of the device is in the state of `generator`,
// which goes on from there; then it is as before. No other thread may use it meanwhile.
class DefaultGeneratorAs {
 public:
  explicit DefaultGeneratorAs(at::Generator generator);
  ~DefaultGeneratorAs();
  DefaultGeneratorAs(const DefaultGeneratorAs&) = delete;
  DefaultGeneratorAs& operator=(const DefaultGeneratorAs&) = delete;

 private:
  at::Generator generator_, default_;
  at::Tensor before_;
};

}  // namespace fsdp::internal
