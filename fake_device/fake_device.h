// A device whose tensors have shapes and no values. Operators find out the shapes of
// their results by LibTorch's meta kernels, memory is counted and is never there, and
// streams and events are always done. So a program for an accelerator runs in the time
// that its host needs, whatever the model's size, and tells how much memory it would take
// there; with process groups of the "fake" backend, as one rank of any world.
//
//   fsdp::install_fake_device();
//   const auto model = [] {
//     const fsdp::OnFakeDevice here;
//     return Model();
//   }();
//   fsdp::reset_fake_peak();
//   loss(model->forward(tokens)).backward();
//   std::cout << fsdp::fake_memory().peak;
//
// It is LibTorch's PrivateUse1, of one device, and a process that installs it has it
// until it ends. item() gives 1, or true: there are no values. An operator without a meta
// kernel throws, naming it.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>

namespace fsdp {

constexpr auto kFakeDevice = c10::DeviceType::PrivateUse1;

// Once per process; later calls do nothing. Throws c10::Error where the process has
// another PrivateUse1 device.
void install_fake_device();

// How scaled_dot_product_attention is computed from now on: by one operator that keeps
// neither scores nor probabilities, as on CUDA, which is so from the start, or by
// products and a softmax, as where there is no such operator.
enum class FakeAttention { kFused, kComposed };
void set_fake_attention(FakeAttention attention);

// Within its scope, and thread, what makes tensors makes them on the fake device, where
// it would on the CPU: torch.device() as a context in Python. After
// install_fake_device().
class OnFakeDevice {
 public:
  OnFakeDevice();

 private:
  c10::impl::IncludeDispatchKeyGuard mode_;
};

// In bytes, as tensors asked for them: an allocator of CUDA rounds each up to 512, and
// its free blocks come on top.
struct FakeMemory {
  int64_t now = 0;
  int64_t peak = 0;  // since the last reset_fake_peak(), or the start
};
FakeMemory fake_memory();
void reset_fake_peak();

// Of products of matrices and attention since the start, multiplications and additions
// counted each.
double fake_flops();

}  // namespace fsdp
