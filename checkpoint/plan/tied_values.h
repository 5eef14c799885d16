// Whether what is one tensor in a model is one where it comes from, too: under each of
// its names the same values, bit by bit.
#pragma once

#include "checkpoint/format/catalog/catalog.h"
#include "checkpoint/io/tensor_reader.h"
#include "checkpoint/plan/state_items.h"

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace fsdp::internal::checkpoint {

// Of two plain tensors, or of this rank's parts of two DTensors that lie alike; else
// false. Local.
bool have_same_values(const at::Tensor& a, const at::Tensor& b);

// Throws ValueError that names both for different values of `named` under two of
// `stored_names`. Reads this rank's part of each. Local.
void check_tied_in_file(const Catalog& catalog, const std::vector<std::string>& stored_names,
                        const NamedTensor& named, ReadRules rules);

}  // namespace fsdp::internal::checkpoint
