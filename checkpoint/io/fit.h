// Whether values of one shape and dtype may become those of a tensor.
#pragma once

#include <ATen/core/Tensor.h>
#include <absl/status/status.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <string>

namespace fsdp::internal::checkpoint {

// What the values are and how messages call the place where they come from.
struct Offered {
  c10::ScalarType dtype;
  c10::IntArrayRef shape;
  std::string place;   // "in the file"
  std::string advice;  // against a conversion that loses something
};
// kInvalidArgument for another shape, and for a conversion that loses something unless
// `cast`.
absl::Status check_fits(const std::string& name, const at::Tensor& target, const Offered& offered,
                        bool cast);

// Collects what does not fit, so that one error names all of it.
class Misfits {
 public:
  // Keeps kInvalidArgument; throws for other errors.
  void note(const absl::Status& status);
  // Throws ValueError with the first 20 and the number of the others.
  void raise_any() const;

 private:
  std::string text_;
  int64_t count_ = 0;
};

}  // namespace fsdp::internal::checkpoint
