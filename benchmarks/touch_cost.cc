// What a parameter on demand costs an operator that finds it unsharded: time per call
// over that of the same call on a plain tensor, in nanoseconds, median of interleaved
// rounds.
//
//   touch_cost [--rounds=41] [--calls=2000]
//
// Two kinds of parameter: a group that is ready when it is touched (the gate's own cost),
// and a member of a sharded module of two ranks, of which this process is one (its
// collectives go nowhere), held unsharded.
#include "device_mesh/process_group.h"
#include "fully_shard/fully_shard.h"
#include "on_demand/gate_key.h"
#include "on_demand/on_demand_storage.h"

#include <absl/flags/flag.h>
#include <absl/flags/parse.h>
#include <torch/nn.h>
#include <torch/utils.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

ABSL_FLAG(int, rounds, 41, "rounds, over which medians are taken");
ABSL_FLAG(int, calls, 2000, "calls per round");

namespace {

using fsdp::internal::OnDemandStorage;

// Unsharded for good: a touch makes it ready for the running pass.
class SettlingGroup final : public fsdp::internal::OnDemandGroup {
 public:
  void touch() override { mark_ready(fsdp::internal::current_pass()); }
  void synchronize_metadata(int64_t, c10::TensorImpl*) override {}
  void member_written(int64_t) override {}
  void evict_and_poison() override {}
  void storage_destroyed(int64_t, const OnDemandStorage*) noexcept override {}
  const std::string& parameter_name(int64_t) const override { return name_; }
  at::Tensor gradient_share(int64_t, const at::Tensor& gradient) const override { return gradient; }
  bool is_member(int64_t, const c10::TensorImpl*) const override { return true; }

 private:
  std::string name_ = "parameter";
};

// A parameter on demand with the value of `plain`, which stays alive beside it.
at::Tensor on_demand(const at::Tensor& plain) {
  fsdp::internal::install_gate();
  auto group = c10::make_intrusive<SettlingGroup>();
  auto storage =
      c10::make_intrusive<OnDemandStorage>(c10::intrusive_ptr<fsdp::internal::OnDemandGroup>(group),
                                           0, static_cast<int64_t>(plain.nbytes()), plain.device());
  storage->fill(plain.data_ptr());
  auto* const watched = storage.get();
  const auto keys = c10::DispatchKeySet(
      c10::computeDispatchKey(plain.scalar_type(), c10::kStrided, plain.device()));
  auto impl = c10::make_intrusive<c10::TensorImpl>(
      c10::Storage(c10::intrusive_ptr<c10::StorageImpl>(std::move(storage))),
      keys.add(fsdp::internal::kGateKey), plain.dtype());
  impl->set_sizes_and_strides(plain.sizes(), plain.strides(), 0);
  at::Tensor member(std::move(impl));
  member.set_requires_grad(true);
  watched->watch_requires_grad(member, plain);
  return member;
}

struct Case {
  std::string name;
  at::Tensor parameter;                               // plain
  std::function<at::Tensor(const at::Tensor&)> body;  // with the parameter in either form
};

at::Tensor leaf(at::IntArrayRef shape) { return at::randn(shape).set_requires_grad(true); }

std::vector<Case> reading_cases() {
  const at::Tensor x = at::randn({4, 16});
  const at::Tensor tokens = at::randint(0, 16, {4}, at::kLong);
  const at::Tensor image = at::randn({1, 4, 8, 8});
  const at::Tensor heads = at::randn({1, 2, 4, 16});
  return {
      {"linear", leaf({16, 16}), [=](const at::Tensor& w) { return at::linear(x, w); }},
      {"matmul", leaf({16, 16}), [=](const at::Tensor& w) { return at::matmul(x, w); }},
      {"mm", leaf({16, 16}), [=](const at::Tensor& w) { return at::mm(x, w); }},
      {"addmm", leaf({16, 16}), [=](const at::Tensor& w) { return at::addmm(x, x, w); }},
      {"bmm", leaf({1, 16, 16}),
       [x = x.unsqueeze(0)](const at::Tensor& w) { return at::bmm(x, w); }},
      {"mul", leaf({16}), [=](const at::Tensor& w) { return at::mul(x, w); }},
      {"add", leaf({16}), [=](const at::Tensor& w) { return at::add(x, w); }},
      {"embedding", leaf({16, 8}), [=](const at::Tensor& w) { return at::embedding(w, tokens); }},
      {"layer_norm", leaf({16}), [=](const at::Tensor& w) { return at::layer_norm(x, {16}, w); }},
      {"rms_norm", leaf({16}), [=](const at::Tensor& w) { return at::rms_norm(x, {16}, w); }},
      {"conv2d", leaf({4, 4, 3, 3}), [=](const at::Tensor& w) { return at::conv2d(image, w); }},
      {"attention", leaf({1, 2, 4, 16}),
       [=](const at::Tensor& w) { return at::scaled_dot_product_attention(heads, w, heads); }},
      {"sigmoid", leaf({16}), [](const at::Tensor& w) { return at::sigmoid(w); }},
      {"softmax", leaf({4, 16}), [](const at::Tensor& w) { return at::softmax(w, 1); }},
      {"cat", leaf({4, 16}),
       [=](const at::Tensor& w) {
         return at::cat({x, w});
       }},
      {"cos (boxed)", leaf({16}), [](const at::Tensor& w) { return at::cos(w); }},
  };
}

std::vector<Case> aliasing_cases() {
  return {
      {"t", leaf({16, 16}), [](const at::Tensor& w) { return w.t(); }},
      {"transpose", leaf({16, 16}), [](const at::Tensor& w) { return w.transpose(0, 1); }},
      {"view", leaf({16, 16}), [](const at::Tensor& w) { return w.view({256}); }},
      {"reshape", leaf({16, 16}), [](const at::Tensor& w) { return w.reshape({256}); }},
      {"slice", leaf({16, 16}), [](const at::Tensor& w) { return w.slice(0, 1, 5); }},
      {"select", leaf({16, 16}), [](const at::Tensor& w) { return w.select(0, 1); }},
      {"expand", leaf({1, 16}),
       [](const at::Tensor& w) {
         return w.expand({4, 16});
       }},
      {"permute", leaf({16, 16}),
       [](const at::Tensor& w) {
         return w.permute({1, 0});
       }},
      {"unsqueeze", leaf({16, 16}), [](const at::Tensor& w) { return w.unsqueeze(0); }},
      {"as_strided", leaf({16, 16}), [](const at::Tensor& w) { return w.as_strided({4}, {2}, 1); }},
      {"diagonal (boxed)", leaf({16, 16}), [](const at::Tensor& w) { return w.diagonal(); }},
  };
}

double nanoseconds_per_call(const Case& operation, const at::Tensor& parameter, int calls) {
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < calls; ++i) operation.body(parameter);
  const std::chrono::duration<double, std::nano> passed = std::chrono::steady_clock::now() - start;
  return passed.count() / calls;
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// A module's only parameter, sharded over two ranks and held unsharded.
at::Tensor sharded_member(const at::Tensor& plain, const fsdp::DeviceMesh& mesh,
                          std::vector<std::shared_ptr<torch::nn::Module>>& keep_alive) {
  keep_alive.push_back(std::make_shared<torch::nn::Module>());
  const at::Tensor member = plain.detach().clone().set_requires_grad(true);
  keep_alive.back()->register_parameter("weight", member);
  fsdp::fully_shard(*keep_alive.back(), mesh).unshard();
  return member;
}

void measure(const char* title, const std::vector<Case>& cases, const fsdp::DeviceMesh& mesh) {
  std::printf("%-18s %12s %18s %18s\n", title, "plain, ns", "+ ready, ns", "+ fully_shard, ns");
  std::vector<std::shared_ptr<torch::nn::Module>> modules;
  const int calls = absl::GetFlag(FLAGS_calls);
  for (const auto& operation : cases) {
    const at::Tensor ready = on_demand(operation.parameter);
    const at::Tensor sharded = sharded_member(operation.parameter, mesh, modules);
    std::vector<double> plain, with_gate, with_group;
    for (int round = 0; round < absl::GetFlag(FLAGS_rounds); ++round) {
      const double base = nanoseconds_per_call(operation, operation.parameter, calls);
      plain.push_back(base);
      with_gate.push_back(nanoseconds_per_call(operation, ready, calls) - base);
      with_group.push_back(nanoseconds_per_call(operation, sharded, calls) - base);
    }
    std::printf("%-18s %12.0f %18.0f %18.0f\n", operation.name.c_str(), median(plain),
                median(with_gate), median(with_group));
  }
}

}  // namespace

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  at::set_num_threads(1);
  fsdp::init_process_group({.backend = "fake", .rank = 0, .world_size = 2});
  const auto mesh = fsdp::init_device_mesh(c10::kCPU, {2});
  measure("reads", reading_cases(), mesh);
  measure("aliases", aliasing_cases(), mesh);
  fsdp::destroy_process_group();
  return 0;
}
