#include "tests/early_ends/last_collective.h"

#include "checkpoint/async_save.h"
#include "checkpoint/checkpoint.h"
#include "device_mesh/all_reduce.h"
#include "device_mesh/collectives/collectives.h"
#include "dtensor/dtensor.h"
#include "fully_shard/fully_shard.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/torch.h>

#include <memory>
#include <utility>

namespace fsdp::testing {
namespace {

using internal::Collectives;

void expect(bool holds, const char* what) { TORCH_CHECK(holds, "WRONG VALUES: ", what); }

void expect_all(const torch::Tensor& tensor, double value, const char* what) {
  expect((tensor == value).all().item<bool>(), what);
}

double sum_of_ranks(const DeviceMesh& mesh) {
  return static_cast<double>(mesh.size() * (mesh.size() + 1)) / 2;  // each gives rank + 1
}

Collectives collectives_of(const DeviceMesh& mesh) {
  return Collectives::of(mesh.group(0), torch::kCPU);
}

int64_t elements(const LastOptions& options) { return options.large ? 1 << 20 : 12; }

// One unit, whose weights are 1.
torch::nn::Linear sharded_linear(const DeviceMesh& mesh, const LastOptions& options) {
  const int64_t width = options.large ? 1024 : 8;
  torch::nn::Linear linear(torch::nn::LinearOptions(width, width).bias(false));
  torch::NoGradGuard no_grad;
  linear->weight.fill_(1);
  fully_shard(linear, mesh);
  return linear;
}

torch::Tensor input_of(const torch::nn::Linear& linear, double value) {
  return torch::full({1, linear->options.in_features()}, value);
}

void use(torch::nn::Linear linear) {
  const torch::NoGradGuard no_grad;
  const auto width = static_cast<double>(linear->options.in_features());
  expect_all(linear->forward(input_of(linear, 1)), width, "a unit's use");
  get_fsdp_module(*linear).reshard();
}

LastCollective prepare_all_gather(const DeviceMesh& mesh, const LastOptions& options) {
  return [linear = sharded_linear(mesh, options)] { use(linear); };
}

LastCollective prepare_reduce_scatter(const DeviceMesh& mesh, const LastOptions& options) {
  return [mesh, linear = sharded_linear(mesh, options)]() mutable {
    linear->zero_grad();
    linear->forward(input_of(linear, static_cast<double>(mesh.rank() + 1))).sum().backward();
    const auto mean = sum_of_ranks(mesh) / static_cast<double>(mesh.size());
    for (const auto& parameter : linear->parameters())
      expect_all(DTensor(parameter.grad()).to_local(), mean, "a reduced gradient");
  };
}

LastCollective prepare_all_reduce(const DeviceMesh& mesh, const LastOptions& options) {
  return [mesh, count = elements(options)] {
    const auto tensor = torch::full({count}, static_cast<double>(mesh.rank() + 1));
    expect_all(all_reduce(tensor, mesh), sum_of_ranks(mesh), "all_reduce");
  };
}

LastCollective prepare_barrier(const DeviceMesh& mesh, const LastOptions&) {
  return [mesh] { barrier(mesh); };
}

LastCollective prepare_broadcast(const DeviceMesh& mesh, const LastOptions& options) {
  return [mesh, count = elements(options)] {
    auto tensor = torch::full({count}, static_cast<double>(mesh.rank() + 1));
    collectives_of(mesh).broadcast({.tensor = tensor, .what = "broadcast of the last values"});
    expect_all(tensor, 1, "broadcast");
  };
}

LastCollective prepare_all_to_all(const DeviceMesh& mesh, const LastOptions& options) {
  return [mesh, count = elements(options)] {
    const auto input = torch::full({mesh.size(), count}, static_cast<double>(mesh.rank()));
    auto output = torch::empty_like(input);
    collectives_of(mesh).all_to_all(
        {.output = output, .input = input, .what = "all-to-all of the last values"});
    for (int64_t rank = 0; rank < mesh.size(); ++rank)
      expect_all(output[rank], static_cast<double>(rank), "all_to_all");
  };
}

LastCollective prepare_save(const DeviceMesh& mesh, const LastOptions& options) {
  return [linear = sharded_linear(mesh, options), path = options.folder + "/saved"] {
    save({.model = linear}, path, {.overwrite = true});
  };
}

LastCollective prepare_async_save(const DeviceMesh& mesh, const LastOptions& options) {
  // The program ends while the save goes on.
  return [linear = sharded_linear(mesh, options), path = options.folder + "/saved",
          saving = std::make_shared<SaveHandle>()] {
    *saving = async_save({.model = linear}, path, {.overwrite = true});
  };
}

LastCollective prepare_load(const DeviceMesh& mesh, const LastOptions& options) {
  const auto linear = sharded_linear(mesh, options);
  save({.model = linear}, options.folder + "/saved");
  return [linear, path = options.folder + "/saved"] { load({.model = linear}, path); };
}

LastCollective prepare_side_group(const DeviceMesh& mesh, const LastOptions&) {
  return [mesh, count = std::make_shared<int>(0)] {
    static_cast<void>(mesh.side_group(0, "purpose " + std::to_string(++*count)));
  };
}

LastCollective prepare_new_mesh(const DeviceMesh& mesh, const LastOptions&) {
  return [mesh] {
    static_cast<void>(init_device_mesh(torch::kCPU, {2, 1, mesh.size() / 2}, {"a", "b", "c"}));
  };
}

LastCollective prepare_neighbours(const DeviceMesh& mesh, const LastOptions&) {
  return [mesh] { static_cast<void>(mesh.neighbours(0, mesh.size() / 2)); };
}

struct Named {
  const char* name;
  LastCollective (*prepare)(const DeviceMesh&, const LastOptions&);
};

constexpr Named kAll[] = {
    {"init", [](const DeviceMesh&, const LastOptions&) -> LastCollective { return [] {}; }},
    {"side_group", prepare_side_group},
    {"new_mesh", prepare_new_mesh},
    {"neighbours", prepare_neighbours},
    {"all_gather", prepare_all_gather},
    {"reduce_scatter", prepare_reduce_scatter},
    {"all_reduce", prepare_all_reduce},
    {"barrier", prepare_barrier},
    {"broadcast", prepare_broadcast},
    {"all_to_all", prepare_all_to_all},
    {"save", prepare_save},
    {"async_save", prepare_async_save},
    {"load", prepare_load},
};

}  // namespace

const std::vector<std::string>& last_collectives() {
  static const auto names = [] {
    std::vector<std::string> all;
    for (const auto& each : kAll) all.emplace_back(each.name);
    return all;
  }();
  return names;
}

LastCollective prepare(const std::string& name, const DeviceMesh& mesh,
                       const LastOptions& options) {
  for (const auto& each : kAll) {
    if (name == each.name) return each.prepare(mesh, options);
  }
  TORCH_CHECK(false, "no last collective '", name, "'");
}

}  // namespace fsdp::testing
