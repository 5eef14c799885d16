// Whether plain tensors beside DTensors are the same on all ranks.
#pragma once

#include "device_mesh/device_mesh.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>

namespace fsdp::internal {

// Whether `operand` is a plain tensor that ranks have alike. Numbers that a caller wrote
// are what the code says.
bool counts_as_replicated(const at::Tensor& operand);
// Of its values, shape and dtype. REQUIRES: counts_as_replicated(). Local.
int64_t hash_of_plain(const at::Tensor& operand);

// Throws ValueError on every rank of the mesh where plain tensors among `operands` of
// `what` are not the same on all of them. Collective over the mesh where there are any,
// but for numbers that a caller wrote.
void check_alike(std::string_view what, at::TensorList operands, const DeviceMesh& mesh);

// What DebugOptions::check_replicated asks for.
bool compares_plain();
// check_alike() with DebugOptions::check_replicated, else nothing.
void compare_plain(std::string_view what, at::TensorList operands, const DeviceMesh& mesh);

}  // namespace fsdp::internal
