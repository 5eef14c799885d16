// Programs that ranks run on the CPU over Gloo and on simulated devices, and what is the
// same on both: values to the bit. A program may use a second stream of its own beside
// the current one; on the CPU everything runs in the host's order.
//
//   const Program program = [](ProgramRank& rank) {
//     const auto model = make_sharded_model(rank.mesh());
//     rank.steps(4, [&] {
//       at::Tensor one = model->forward(x), two;
//       rank.on_side([&] { two = rank.hold(model->forward(x)); });
//       rank.join_side();
//       rank.keep(one + two);
//     });
//   };
//   const auto expected = run_on_cpu(program, 2);
//   const auto run = run_on_devices(program, 2, simulated::kLate);
#pragma once

#include "device_mesh/device_mesh.h"
#include "tests/simulated_accelerator/run.h"
#include "tests/simulated_accelerator/world.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::testing {

using Values = std::vector<at::Tensor>;  // on the CPU

class ProgramRank {
 public:
  explicit ProgramRank(DeviceMesh mesh);

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

  // What is compared.
  void keep(const at::Tensor& value) { kept_.push_back(value.detach()); }
  void keep_parameters(const torch::nn::Module& module);
  Values values() const;
  int64_t host_syncs_of_last_step() const { return host_syncs_of_last_step_; }

 private:
  void wait(const c10::Stream& waiter, const c10::Stream& other) const;
  int64_t host_syncs() const;

  DeviceMesh mesh_;
  c10::Device device_;
  std::optional<c10::Stream> side_;  // none on the CPU
  std::vector<at::Tensor> held_, kept_;
  int64_t host_syncs_of_last_step_ = 0;
};

using Program = std::function<void(ProgramRank& rank)>;

struct ProgramRun {
  std::vector<Values> values;  // by rank
  std::vector<int64_t> host_syncs_of_last_step;
  simulated::Report report;  // empty on the CPU
  std::string error;         // of the ranks; empty for none
  bool same_order = true;    // all ranks issued all collectives in one order
};

ProgramRun run_on_cpu(const Program& program, int64_t ranks);
ProgramRun run_on_devices(const Program& program, int64_t ranks,
                          const simulated::Schedule& schedule);

// Of two streams of the program's, one of the library's, and those of groups of a mesh of
// one dimension.
std::vector<simulated::Schedule> schedules_of_programs();

// What is wrong with a run; empty for nothing: values that differ from `expected` in a
// bit, accesses that nothing orders, hosts that did not wait as often in the last step,
// errors.
std::string faults_of(const ProgramRun& run, const ProgramRun& expected, int64_t host_syncs = 0);

}  // namespace fsdp::testing
