// Which parameters of a model are for Muon: the matrices of hidden layers. The rest
// (embeddings, norms, biases, kernels of convolutions, the head) is for an element-wise
// optimizer such as AdamW.
//
//   auto split = fsdp::split_for_muon(*model, {.others = {"head.*"}});
//   std::cout << split;                        // where each parameter goes, and why
//   fsdp::MuonWithAdamW optimizer(split, fsdp::MuonOptions(2e-2), {3e-4});
#pragma once

#include "device_mesh/api.h"
#include "device_mesh/module_ref.h"

#include <torch/types.h>

#include <ostream>
#include <string>
#include <vector>

namespace fsdp {

struct MuonSplitOptions {
  // Names of parameters that are for the other optimizer though they are matrices: the
  // head above all, which looks like any other Linear. A '*' stands for any part of a
  // name between dots.
  std::vector<std::string> others = {};
};

struct MuonSplit {
  struct Parameter {
    std::string name;  // the first one of a tied parameter
    torch::Tensor tensor;
    bool is_for_muon;
    std::string why;  // "2-D", "of an Embedding", "named by 'head.*'"
  };
  std::vector<Parameter> parameters;  // in the model's order, tied ones once

  FSDP_API std::vector<torch::Tensor> matrices() const;
  FSDP_API std::vector<torch::Tensor> others() const;
};

// A parameter is for Muon if its global shape has two dimensions and it belongs to no
// Embedding or EmbeddingBag, so sharded and plain models give the same. A tied parameter
// is for the others if one of its names makes it so. Stacks of matrices (experts) have
// more dimensions and so come to the others: give them to Muon in a group of their own,
// with leading_dims_are_batch. Frozen parameters count. Local. Throws ValueError for a
// pattern of `others` that no name of a parameter matches.
[[nodiscard]] FSDP_API MuonSplit split_for_muon(ConstModuleRef module,
                                                const MuonSplitOptions& options = {});

// A line per parameter: "block0.attention.query.weight  [64, 64]  Muon: 2-D".
FSDP_API std::ostream& operator<<(std::ostream& out, const MuonSplit& split);

}  // namespace fsdp
