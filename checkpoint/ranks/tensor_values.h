// The values of tensors that may be distributed, read and written where they lie, so that
// who manages them knows.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace fsdp::internal::checkpoint {

// This rank's part of a DTensor, up to date; a plain tensor as it is. Without gradient;
// shares memory. Local.
at::Tensor local_value(const at::Tensor& tensor);

// The same to be written, after its owner was told, who is told again when it was
// written. Whoever owns a registry entry counts the writes, so every rank calls them, an
// empty part or not. Local.
at::Tensor open_for_writing(const at::Tensor& tensor);
void close_after_writing(const at::Tensor& tensor);

// What the codes are called that a parameter is stored as (store_codes()); empty for
// values.
std::string codec_of(const at::Tensor& tensor);

}  // namespace fsdp::internal::checkpoint
