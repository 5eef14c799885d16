// Programs that ranks run on the CPU over Gloo, on simulated devices and on a GPU, and
// the values that they keep, which are compared. A program may use a second stream of its
// own beside the current one; on the CPU everything runs in the host's order.
//
//   const TrainingProgram program = [](ProgramRank& rank) {
//     const auto model = make_sharded_model(rank.mesh());
//     rank.steps(4, [&] {
//       at::Tensor one = model->forward(x), two;
//       rank.on_side([&] { two = rank.hold(model->forward(x)); });
//       rank.join_side();
//       rank.keep(one + two);
//     });
//   };
//   const auto expected = run_on_cpu(program, 2);
#pragma once

#include "device_mesh/device_mesh.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace fsdp::testing {

using Values = std::vector<at::Tensor>;  // on the CPU

// What is done to a program besides.
struct ProgramHooks {
  // Of the device, so far.
  std::function<int64_t()> host_syncs = [] { return int64_t{0}; };
  // Called with the second stream current before what it is given, and with the first one
  // current after that.
  std::function<void()> before_side = [] {};
  std::function<void()> after_side = [] {};
};

class ProgramRank {
 public:
  explicit ProgramRank(DeviceMesh mesh, ProgramHooks hooks = {});

  const DeviceMesh& mesh() const { return mesh_; }
  int64_t rank() const { return mesh_.rank(); }
  c10::Device device() const { return device_; }

  // `body`, `count` times. What steps hold is let go when the two streams have waited for
  // each other before the next one.
  void steps(int count, const std::function<void()>& body);

  // `body` with the second stream current, after all that the current one was given.
  void on_side(const std::function<void()>& body);
  // The same, after what the second stream itself was given alone.
  void on_side_at_once(const std::function<void()>& body);
  // The current stream waits for all that the second one was given.
  void join_side();
  // Keeps a tensor that both streams use until the next step, as a program without
  // record_stream() has to.
  at::Tensor hold(const at::Tensor& tensor);
  // Takes, writes and gives back memory of many sizes on the current stream.
  void allocate_much();

  // What is compared. Of a DTensor the full value: collective over its mesh.
  void keep(const at::Tensor& value);
  void keep_parameters(const torch::nn::Module& module);
  // Of its parameters; of undefined ones a tensor without elements.
  void keep_gradients(const torch::nn::Module& module);
  // When both streams are done.
  Values values();
  int64_t host_syncs_of_last_step() const { return host_syncs_of_last_step_; }

 private:
  c10::Stream current_stream() const;
  void wait(const c10::Stream& waiter, const c10::Stream& other) const;

  DeviceMesh mesh_;
  ProgramHooks hooks_;
  c10::Device device_;
  std::optional<c10::Stream> side_;  // none on the CPU
  std::vector<at::Tensor> held_, kept_;
  int64_t host_syncs_of_last_step_ = 0;
};

using TrainingProgram = std::function<void(ProgramRank& rank)>;

// The values that each of `ranks` threads keeps.
std::vector<Values> run_on_cpu(const TrainingProgram& program, int64_t ranks);

}  // namespace fsdp::testing
