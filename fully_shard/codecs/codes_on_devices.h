// The formats of number_formats.h by LibTorch's operators, for tensors on devices, with
// the same bits: `values` [rows, n], `codes` uint8 [rows, row_bytes(n)]. Operators take
// memory of some times the values for what lies between them. Ordered on the current
// stream.
#pragma once

#include <ATen/core/Tensor.h>

namespace fsdp::internal {

struct Mxfp8OnDevices {
  static void encode(const at::Tensor& values, const at::Tensor& codes);
  static void decode(const at::Tensor& codes, const at::Tensor& values);
};

struct Mxint8OnDevices {
  static void encode(const at::Tensor& values, const at::Tensor& codes);
  // Value i of all rows, one behind the other, is rounded by the hash of seed + i.
  static void encode_at_random(const at::Tensor& values, const at::Tensor& codes, uint64_t seed);
  static void decode(const at::Tensor& codes, const at::Tensor& values);
};

struct Fp8RowsOnDevices {
  static void encode(const at::Tensor& values, const at::Tensor& codes);
  static void decode(const at::Tensor& codes, const at::Tensor& values);
};

struct Nf4OnDevices {
  static void encode(const at::Tensor& values, const at::Tensor& codes);
  static void decode(const at::Tensor& codes, const at::Tensor& values);
};

}  // namespace fsdp::internal
