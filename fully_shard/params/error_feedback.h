// Error feedback (GradientCodecs; Seide et al., "1-Bit Stochastic Gradient Descent",
// 2014): what codes took off this rank's gradients on their way to the replicas, until
// another reduction of the same parameters sends it. Local; on the reduce stream.
#pragma once

#include "fully_shard/params/group_info.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace fsdp::internal {

class ErrorFeedback {
 public:
  explicit ErrorFeedback(const GroupAccounts& accounts) : accounts_(accounts) {}
  ~ErrorFeedback();
  ErrorFeedback(const ErrorFeedback&) = delete;

  // What a reduction of `dtype` left of these parameters (their places in the group), and
  // keeps no longer, nor what is left of others in that dtype; undefined for nothing.
  at::Tensor take(at::ScalarType dtype, const std::vector<int64_t>& params);
  // Beside what is kept of them already: backwards may be published together.
  void keep(at::ScalarType dtype, const std::vector<int64_t>& params, at::Tensor left);
  // Of what is kept or was taken, in Counters::gradient_bytes.
  void count(int64_t bytes) const { accounts_.add(&Counters::gradient_bytes, bytes); }

 private:
  struct Left {
    at::ScalarType dtype;
    std::vector<int64_t> params;
    at::Tensor values;
  };
  const GroupAccounts& accounts_;
  std::vector<Left> kept_;
};

// What one reduction takes from the feedback and leaves to it: what it took, where it
// comes to nothing.
class Remainder {
 public:
  // Of a reduction of `params` (places in the group) in `dtype`. `shape`: of what is
  // encoded; `like`: of the dtype of its sums.
  Remainder(const std::shared_ptr<ErrorFeedback>& feedback, at::ScalarType dtype,
            std::vector<int64_t> params, c10::IntArrayRef shape, const at::Tensor& like);
  ~Remainder();
  Remainder(const Remainder&) = delete;

  // To be added to what is encoded, and to become what that loses.
  const at::Tensor& values() const { return values_; }
  // That is what it leaves.
  void published() { left_ = values_; }

 private:
  std::weak_ptr<ErrorFeedback> feedback_;
  at::ScalarType dtype_;
  std::vector<int64_t> params_;
  at::Tensor left_, values_;
  int64_t bytes_ = 0;
};

}  // namespace fsdp::internal
