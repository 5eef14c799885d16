// What travels in the place of a parameter's values when its unit is gathered
// (FullyShardOptions::gather_codec_fn): codes, row by row, such as numbers of 8 bits with
// a scale for each block. Shards, gradients and the optimizer's state stay what they are;
// members are decode(encode(weight)), with the same bits in every world, since a row,
// what belongs to one index of the dimension that is cut, is encoded by itself.
//
//   fsdp::FullyShardOptions options;
//   options.gather_codec_fn = [](const std::string&, const at::Tensor& weight) {
//     return weight.dim() == 2 ? fsdp::mxfp8() : nullptr;
//   };
//   fsdp::fully_shard(block, mesh, options);
//
// One's own, here of two bytes for each value (what param_dtype = kBFloat16 gathers, but
// that members stay Float):
//
//   auto codec = std::make_shared<fsdp::GatherCodec>();
//   codec->name = "my bf16";
//   codec->row_bytes = [](int64_t elements) { return 2 * elements; };
//   codec->encode = [](const at::Tensor& values, const at::Tensor& codes) {
//     codes.copy_(values.to(at::kBFloat16).view(at::kByte));
//   };
//   codec->decode = [](const at::Tensor& codes, const at::Tensor& values) {
//     values.copy_(codes.contiguous().view(at::kBFloat16));
//   };
//
// How it compares, what it costs: docs/wire.md.
#pragma once

#include "device_mesh/api.h"
#include "device_mesh/module_ref.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace fsdp {

// Functions are called on the current stream's device, by one thread of a rank at a time,
// with contiguous tensors. They must give the same bytes for a row whatever rows are
// beside it. What encoding throws on one rank is the error of all that wait for its row,
// with the parameter's name: those along its dimension of the mesh. It is that rank's
// alone on devices, where the dimension has one rank, and in decoding; ranks that do not
// hear of it wait for that one's next collective, or its end.
struct GatherCodec {
  // In errors. Ranks must use codecs of one name for a parameter.
  std::string name;
  // Of the codes of a row of so many values; the same whenever it is asked.
  std::function<int64_t(int64_t elements)> row_bytes;
  // `values`: [rows, elements], this rank's part, in the registry entry's dtype;
  // gradients in reduce_dtype. Writes `codes`: uint8 [rows, row_bytes(elements)].
  std::function<void(const at::Tensor& values, const at::Tensor& codes)> encode;
  // Writes `values`: [rows, elements], in the member's dtype; gradients in what they are
  // added in (Float for 16-bit types).
  std::function<void(const at::Tensor& codes, const at::Tensor& values)> decode;
  // Of gradients (GradientCodecs): as `encode`, but rounded up or down so that the mean
  // over all seeds is the value. Value i, counted over all rows, takes what `seed` + i
  // draws; reductions, ranks and rows have seeds of their own. Empty: `encode` is called.
  std::function<void(const at::Tensor& values, const at::Tensor& codes, uint64_t seed)>
      encode_at_random = {};
};

// Frozen parameters of the units at and below `module` that have a gather codec are
// stored as codes from now on (QLoRA: the base of adapters in nf4()): this rank's shard
// takes what its codes take, and nothing is encoded when it is gathered. Their registry
// entries become DTensors of uint8 [rows, bytes of a row's codes], which checkpoints save
// and load as such; members stay what they were, and can neither be written nor trained
// any more. Returns how many became codes. Local; every rank must do the same. Throws
// ValueError, with nothing changed, for a parameter with a codec that is trained, has a
// gradient, is tensor-parallel, in full precision or not cut along dimension 0, and while
// its unit is held, in use, part of a live graph or without values. What the codec throws
// leaves its unit unchanged, those before it stored.
FSDP_API int64_t store_codes(ModuleRef module);

// Codes in the place of gradients, where these are added up over ranks. They are decoded
// and added, 16-bit types in Float, in the order of the ranks, so that each value is
// rounded once, not at every step as in a ring of 16 bits; flags that travel beside them
// stay exact. A rank's gradients are encoded in pieces of 4,096 values, each of them a
// row; fully_shard throws ValueError where such a row takes 16,384 bytes or more.
// mxint8() rounds at random: the error of a sum then has the mean 0 and, of normally
// distributed gradients that are independent, 1.1 % of its size (root mean square) for
// any number of ranks. Not for steps that are captured in a CUDA graph, which would round
// alike at every replay.
struct GradientCodecs {
  // Of a unit's reduce-scatter, over the ranks that shard it.
  std::shared_ptr<const GatherCodec> shards = nullptr;
  // Hybrid sharding: of the sum over the replicas (an all-reduce, HFSDP: a
  // reduce-scatter), such as between nodes.
  std::shared_ptr<const GatherCodec> replicas = nullptr;
  // Of `replicas`: what rounding took off this rank's gradients is added to the next ones
  // (error feedback: Seide et al., "1-Bit Stochastic Gradient Descent", 2014), unless
  // their backward fails. Takes the memory of a gradient shard, and is in no checkpoint.
  // It is of the unit's trained parameters: all lose theirs where others are trained than
  // before, and a parameter that no rank used in a step loses its own. A step that loss
  // scaling skips keeps what its finite gradients left.
  bool error_feedback = false;
};

// Codecs for floating parameters, computed in Float. What is not finite arrives so;
// finite values in a block with an infinity arrive as 0, in int8 and NF4 also beside a
// NaN. A row's values are taken one behind the other, whatever its dimensions are.
// Relative errors are of normally distributed values (root mean square).

// E4M3 with a scale, a power of two, for each 32 values (OCP Microscaling Formats,
// revision 1.0): 1 + 1/32 bytes for each value. Relative error 2.9 %.
[[nodiscard]] FSDP_API std::shared_ptr<const GatherCodec> mxfp8();
// 8-bit integers with such a scale: 1 + 1/32 bytes. Relative error 0.8 %. Rounds
// gradients at random.
[[nodiscard]] FSDP_API std::shared_ptr<const GatherCodec> mxint8();
// E4M3 with a Float scale for the row: 1 byte for each value and 4 for the row. Relative
// error 2.7 %.
[[nodiscard]] FSDP_API std::shared_ptr<const GatherCodec> fp8_rows();
// NF4 with double quantisation (Dettmers et al., "QLoRA", 2023): blocks of 64 values, of
// whose scales 256 share a mean and a step: 1/2 + 1/64 bytes for each value, and 8 for
// each 16,384 of a row, begun ones included. Relative error 9.2 %. For what is not
// trained.
[[nodiscard]] FSDP_API std::shared_ptr<const GatherCodec> nf4();

}  // namespace fsdp
