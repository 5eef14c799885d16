// The masks that a thread draws, in their order: what bernoulli_ gives on plain tensors,
// which for a DTensor is the mask of the whole.
#pragma once

#include "dtensor/dtensor.h"

#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string_view>
#include <vector>

namespace fsdp::testing {

class DrawnMasks {
 public:
  DrawnMasks() : handle_(at::addThreadLocalCallback(callback())) { list() = &masks_; }
  ~DrawnMasks() {
    at::removeCallback(handle_);
    list() = nullptr;
  }
  DrawnMasks(const DrawnMasks&) = delete;
  DrawnMasks& operator=(const DrawnMasks&) = delete;

  const std::vector<at::Tensor>& masks() const { return masks_; }

 private:
  static std::vector<at::Tensor>*& list() {
    thread_local std::vector<at::Tensor>* list = nullptr;
    return list;
  }

  static at::RecordFunctionCallback callback() {
    return at::RecordFunctionCallback(
               [](const at::RecordFunction&) -> std::unique_ptr<at::ObserverContext> {
                 return nullptr;
               },
               [](const at::RecordFunction& function, at::ObserverContext*) { keep(function); })
        .needsOutputs(true)
        .scopes({at::RecordScope::FUNCTION});
  }

  static void keep(const at::RecordFunction& function) {
    if (std::string_view(function.name()) != "aten::bernoulli_") return;
    const at::Tensor mask = function.outputs().at(0).toTensor();
    if (is_dtensor(mask)) return;
    const at::DisableRecordFunctionGuard unheard;
    const torch::NoGradGuard no_grad;
    list()->push_back(mask.clone());
  }

  std::vector<at::Tensor> masks_;
  at::CallbackHandle handle_;
};

inline void expect_same_masks(const std::vector<at::Tensor>& found,
                              const std::vector<at::Tensor>& wanted) {
  ASSERT_EQ(found.size(), wanted.size());
  for (size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(found[i].equal(wanted[i])) << i;
}

}  // namespace fsdp::testing
