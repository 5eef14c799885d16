#include "optim/muon_with_adamw.h"

#include "optim/internal/muon_groups.h"

#include <c10/util/Exception.h>
#include <torch/serialize/archive.h>
#include <torch/types.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace fsdp {
namespace {

using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::OptimizerParamState;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

bool is_adamw_group(const OptimizerParamGroup& group) {
  return dynamic_cast<const AdamWOptions*>(&group.options()) != nullptr;
}

std::vector<OptimizerParamGroup> groups_of(const MuonSplit& split, const MuonOptions& muon,
                                           const AdamWOptions& adamw) {
  std::vector<OptimizerParamGroup> groups;
  auto matrices = split.matrices(), others = split.others();
  if (!matrices.empty())
    groups.emplace_back(std::move(matrices), std::make_unique<MuonOptions>(muon));
  if (!others.empty())
    groups.emplace_back(std::move(others), std::make_unique<AdamWOptions>(adamw));
  TORCH_CHECK_VALUE(!groups.empty(), "MuonWithAdamW: the module has no parameters");
  return groups;
}

void check_has_options(const OptimizerParamGroup& group, size_t number) {
  TORCH_CHECK_VALUE(group.has_options(), "MuonWithAdamW: group ", number,
                    " has no options, expected MuonOptions or AdamWOptions, which say whose it is");
}

const std::vector<OptimizerParamGroup>& with_options(
    const std::vector<OptimizerParamGroup>& groups) {
  for (size_t i = 0; i < groups.size(); ++i) check_has_options(groups[i], i);
  return groups;
}

}  // namespace

MuonWithAdamW::MuonWithAdamW(const MuonSplit& split, MuonOptions muon, AdamWOptions adamw)
    : MuonWithAdamW(groups_of(split, muon, adamw)) {}

MuonWithAdamW::MuonWithAdamW(const std::vector<OptimizerParamGroup>& param_groups)
    : Optimizer(with_options(param_groups), std::make_unique<AdamWOptions>()) {
  internal::keep_options(param_groups_, param_groups);
  check_groups();
}

void MuonWithAdamW::add_param_group(const OptimizerParamGroup& group) {
  check_has_options(group, param_groups_.size());
  Optimizer::add_param_group(group);
  internal::keep_group(param_groups_, group, [this] { check_groups(); });
}

void MuonWithAdamW::check_groups() const {
  for (size_t i = 0; i < param_groups_.size(); ++i) {
    if (internal::muon_options(param_groups_[i]) != nullptr) {
      internal::check_muon_group(param_groups_[i], i);
    } else {
      TORCH_CHECK_VALUE(is_adamw_group(param_groups_[i]), "MuonWithAdamW: group ", i,
                        " has options of another optimizer, expected MuonOptions or AdamWOptions");
    }
  }
}

torch::Tensor MuonWithAdamW::step(LossClosure closure) {
  const auto loss = internal::loss_of(closure);
  check_groups();
  internal::step_muon_groups(param_groups_, state_, counters_);
  step_adamw_groups();
  return loss;
}

// By an AdamW of those groups, which has the state for the time of its step.
void MuonWithAdamW::step_adamw_groups() {
  std::vector<OptimizerParamGroup> groups;
  for (const auto& group : param_groups_)
    if (is_adamw_group(group)) groups.push_back(group);
  if (groups.empty()) return;
  AdamW adamw(groups);
  struct Lent {
    internal::OptimizerState &own, &borrowed;
    Lent(internal::OptimizerState& state, internal::OptimizerState& to) : own(state), borrowed(to) {
      own.swap(borrowed);
    }
    ~Lent() { own.swap(borrowed); }
  };
  const Lent lent(state_, adamw.state());
  adamw.step();
}

// Saving and loading, in the form of LibTorch's own (torch/optim/serialize.h), whose
// templates know one class of options and state, and here groups have several.
namespace {

// An empty one of the group's class.
std::unique_ptr<OptimizerParamState> new_state(const OptimizerParamGroup& group) {
  if (is_adamw_group(group)) return std::make_unique<torch::optim::AdamWParamState>();
  return std::make_unique<MuonParamState>();
}

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

ReadGroup read_group(InputArchive& archive, InputArchive& states, const OptimizerParamGroup& group,
                     size_t number) {
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

void MuonWithAdamW::save(OutputArchive& archive) const {
  archive.write("pytorch_version", c10::IValue("1.5.0"));  // of the form, as LibTorch's says
  OutputArchive states(archive.compilation_unit()), groups(archive.compilation_unit());
  for (const auto& [handle, state] : state_) {
    OutputArchive fields(archive.compilation_unit());
    state->serialize(fields);
    states.write(std::to_string(reinterpret_cast<size_t>(handle)), fields);
  }
  archive.write("state", states);
  write_size(groups, "param_groups/size", param_groups_.size());
  for (size_t i = 0; i < param_groups_.size(); ++i) {
    auto group = archive_of(archive, param_groups_[i]);
    groups.write("param_groups/" + std::to_string(i), group);
  }
  archive.write("param_groups", groups);
}

// State of parameters that the archive has none of stays.
void MuonWithAdamW::load(InputArchive& archive) {
  InputArchive states, groups;
  archive.read("state", states);
  archive.read("param_groups", groups);
  const size_t size = read_size(groups, "param_groups/size");
  TORCH_CHECK(size == param_groups_.size(), "the optimizer has ", param_groups_.size(),
              " groups of parameters, and ", size, " where it was saved");
  std::vector<ReadGroup> read;
  for (size_t i = 0; i < param_groups_.size(); ++i) {
    InputArchive group;
    groups.read("param_groups/" + std::to_string(i), group);
    read.push_back(read_group(group, states, param_groups_[i], i));
  }
  for (size_t i = 0; i < param_groups_.size(); ++i) {
    param_groups_[i].set_options(std::move(read[i].options));
    for (size_t k = 0; k < read[i].states.size(); ++k) {
      if (read[i].states[k] != nullptr)
        state_[param_groups_[i].params()[k].unsafeGetTensorImpl()] = std::move(read[i].states[k]);
    }
  }
}

}  // namespace fsdp
