#include "optim/split_for_muon.h"

#include "device_mesh/internal/name_pattern.h"
#include "device_mesh/module_ref.h"

#include <c10/util/Exception.h>
#include <torch/nn/modules/embedding.h>

#include <algorithm>
#include <map>
#include <set>

namespace fsdp {
namespace {

using Parameter = MuonSplit::Parameter;

// Those of embeddings, by handle.
std::set<const void*> embedded_parameters(const torch::nn::Module& module) {
  std::set<const void*> handles;
  module.apply([&handles](const torch::nn::Module& each) {
    const bool is_embedding =
        each.as<torch::nn::Embedding>() != nullptr || each.as<torch::nn::EmbeddingBag>() != nullptr;
    if (!is_embedding) return;
    for (const auto& parameter : each.parameters()) handles.insert(parameter.unsafeGetTensorImpl());
  });
  return handles;
}

// Which patterns of `others` mean which names.
class NamedOthers {
 public:
  explicit NamedOthers(const std::vector<std::string>& patterns) : patterns_(patterns) {}

  // The first pattern that means `name`, empty where none does.
  std::string pattern_of(const std::string& name) {
    std::string first;
    for (const auto& pattern : patterns_) {
      if (!internal::is_match(pattern, name)) continue;
      matched_.insert(pattern);
      if (first.empty()) first = pattern;
    }
    return first;
  }

  void check_all_matched() const {
    for (const auto& pattern : patterns_)
      TORCH_CHECK_VALUE(matched_.count(pattern) != 0, "split_for_muon: others: '", pattern,
                        "' matches no name of a parameter, expected one such as 'head.weight'");
  }

 private:
  const std::vector<std::string>& patterns_;
  std::set<std::string> matched_;
};

void make_other(Parameter& parameter, const std::string& why) {
  if (!parameter.is_for_muon) return;
  parameter.is_for_muon = false;
  parameter.why = why;
}

std::vector<torch::Tensor> tensors_where(const MuonSplit& split, bool is_for_muon) {
  std::vector<torch::Tensor> tensors;
  for (const auto& parameter : split.parameters)
    if (parameter.is_for_muon == is_for_muon) tensors.push_back(parameter.tensor);
  return tensors;
}

}  // namespace

std::vector<torch::Tensor> MuonSplit::matrices() const { return tensors_where(*this, true); }
std::vector<torch::Tensor> MuonSplit::others() const { return tensors_where(*this, false); }

MuonSplit split_for_muon(ConstModuleRef module, const MuonSplitOptions& options) {
  const auto& model = internal::given_module("split_for_muon", module);
  const auto embedded = embedded_parameters(model);
  NamedOthers named(options.others);
  std::map<const void*, size_t> positions;
  MuonSplit split;
  for (const auto& item : model.named_parameters()) {
    const auto& tensor = item.value();
    const void* const handle = tensor.unsafeGetTensorImpl();
    const auto [known, is_new] = positions.emplace(handle, split.parameters.size());
    if (is_new)
      split.parameters.push_back(
          {item.key(), tensor, tensor.dim() == 2 && !tensor.is_complex(),
           c10::str(tensor.dim(), "-D", tensor.is_complex() ? ", complex" : "")});
    auto& parameter = split.parameters[known->second];
    if (embedded.count(handle) != 0) make_other(parameter, "of an Embedding");
    const auto pattern = named.pattern_of(item.key());
    if (!pattern.empty()) make_other(parameter, "named by '" + pattern + "'");
  }
  named.check_all_matched();
  return split;
}

std::ostream& operator<<(std::ostream& out, const MuonSplit& split) {
  for (const auto& [name, tensor, is_for_muon, why] : split.parameters)
    out << name << "  " << tensor.sizes() << "  " << (is_for_muon ? "Muon: " : "other: ") << why
        << "\n";
  return out;
}

}  // namespace fsdp
