#include "optim/muon_with_adamw.h"

#include "optim/internal/group_archive.h"
#include "optim/internal/muon_groups.h"

#include <c10/util/Exception.h>

#include <utility>

namespace fsdp {
namespace {

using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::OptimizerParamState;

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

const std::vector<OptimizerParamGroup>& with_options(
    const std::vector<OptimizerParamGroup>& groups) {
  for (size_t i = 0; i < groups.size(); ++i)
    TORCH_CHECK_VALUE(
        groups[i].has_options(), "MuonWithAdamW: group ", i,
        " has no options, expected MuonOptions or AdamWOptions, which say whose it is");
  return groups;
}

std::unique_ptr<OptimizerParamState> new_state(const OptimizerParamGroup& group) {
  if (is_adamw_group(group)) return std::make_unique<torch::optim::AdamWParamState>();
  return std::make_unique<MuonParamState>();
}

}  // namespace

MuonWithAdamW::MuonWithAdamW(const MuonSplit& split, MuonOptions muon, AdamWOptions adamw)
    : MuonWithAdamW(groups_of(split, muon, adamw)) {}

MuonWithAdamW::MuonWithAdamW(const std::vector<OptimizerParamGroup>& param_groups)
    : Optimizer(with_options(param_groups), std::make_unique<AdamWOptions>()) {
  check_groups();
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

void MuonWithAdamW::save(torch::serialize::OutputArchive& archive) const {
  internal::write_groups(archive, *this);
}

void MuonWithAdamW::load(torch::serialize::InputArchive& archive) {
  internal::read_groups(archive, *this, new_state);
}

}  // namespace fsdp
