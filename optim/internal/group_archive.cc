#include "optim/internal/group_archive.h"

#include <c10/util/Exception.h>
#include <torch/serialize/archive.h>
#include <torch/types.h>

#include <string>
#include <utility>
#include <vector>

namespace fsdp::internal {
namespace {

using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::OptimizerParamState;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

std::string key_of(const at::Tensor& param) {
  return std::to_string(reinterpret_cast<size_t>(param.unsafeGetTensorImpl()));
}

void write_size(OutputArchive& archive, const std::string& key, size_t size) {
  archive.write(key, torch::tensor(static_cast<int64_t>(size)));
}

size_t read_size(InputArchive& archive, const std::string& key) {
  torch::Tensor size;
  archive.read(key, size);
  return static_cast<size_t>(size.item<int64_t>());
}

OutputArchive archive_of(const OutputArchive& parent, const OptimizerParamGroup& group) {
  OutputArchive archive(parent.compilation_unit()), options(parent.compilation_unit());
  write_size(archive, "params/size", group.params().size());
  for (size_t i = 0; i < group.params().size(); ++i)
    archive.write("params/" + std::to_string(i), c10::IValue(key_of(group.params()[i])));
  group.options().serialize(options);
  archive.write("options", options);
  return archive;
}

// What a group of the archive has for the optimizer's group.
struct ReadGroup {
  std::unique_ptr<OptimizerOptions> options;
  std::vector<std::unique_ptr<OptimizerParamState>> states;  // by parameter; null: none there
};

template <class NewState>
ReadGroup read_group(InputArchive& archive, InputArchive& states, const OptimizerParamGroup& group,
                     size_t number, const NewState& new_state) {
  const size_t size = read_size(archive, "params/size");
  TORCH_CHECK(size == group.params().size(), "group ", number, " of the optimizer has ",
              group.params().size(), " parameters, and ", size, " where it was saved");
  ReadGroup read{.options = group.options().clone(), .states = {}};
  InputArchive options;
  archive.read("options", options);
  read.options->serialize(options);
  for (size_t i = 0; i < size; ++i) {
    c10::IValue key;
    archive.read("params/" + std::to_string(i), key);
    InputArchive state;
    auto& added = read.states.emplace_back();
    if (!states.try_read(key.toStringRef(), state)) continue;
    added = new_state(group);
    added->serialize(state);
  }
  return read;
}

}  // namespace

void write_groups(OutputArchive& archive, const torch::optim::Optimizer& optimizer) {
  archive.write("pytorch_version", c10::IValue("1.5.0"));  // of the form, as LibTorch's says
  OutputArchive states(archive.compilation_unit()), groups(archive.compilation_unit());
  for (const auto& [handle, state] : optimizer.state()) {
    OutputArchive fields(archive.compilation_unit());
    state->serialize(fields);
    states.write(std::to_string(reinterpret_cast<size_t>(handle)), fields);
  }
  archive.write("state", states);
  const auto& own = optimizer.param_groups();
  write_size(groups, "param_groups/size", own.size());
  for (size_t i = 0; i < own.size(); ++i) {
    auto group = archive_of(archive, own[i]);
    groups.write("param_groups/" + std::to_string(i), group);
  }
  archive.write("param_groups", groups);
}

void read_groups(
    InputArchive& archive, torch::optim::Optimizer& optimizer,
    c10::function_ref<std::unique_ptr<OptimizerParamState>(const OptimizerParamGroup&)> new_state) {
  InputArchive states, groups;
  archive.read("state", states);
  archive.read("param_groups", groups);
  auto& own = optimizer.param_groups();
  const size_t size = read_size(groups, "param_groups/size");
  TORCH_CHECK(size == own.size(), "the optimizer has ", own.size(), " groups of parameters, and ",
              size, " where it was saved");
  std::vector<ReadGroup> read;
  for (size_t i = 0; i < own.size(); ++i) {
    InputArchive group;
    groups.read("param_groups/" + std::to_string(i), group);
    read.push_back(read_group(group, states, own[i], i, new_state));
  }
  for (size_t i = 0; i < own.size(); ++i) {
    own[i].set_options(std::move(read[i].options));
    for (size_t k = 0; k < read[i].states.size(); ++k) {
      if (read[i].states[k] != nullptr)
        optimizer.state()[own[i].params()[k].unsafeGetTensorImpl()] = std::move(read[i].states[k]);
    }
  }
}

}  // namespace fsdp::internal
