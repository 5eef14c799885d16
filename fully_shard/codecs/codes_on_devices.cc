#include "fully_shard/codecs/codes_on_devices.h"

#include "fully_shard/codecs/number_formats.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bucketize.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>

#include <cfloat>
#include <cstdint>
#include <optional>
#include <vector>

namespace fsdp::internal {
namespace {

// `row`, [rows, n], padded with zeros: [rows, blocks, size].
at::Tensor in_blocks(const at::Tensor& row, int64_t size) {
  const auto n = row.size(1), blocks = (n + size - 1) / size;
  const auto padded =
      blocks * size == n ? row.contiguous() : at::constant_pad_nd(row, {0, blocks * size - n});
  return padded.view({row.size(0), blocks, size});
}

// The first n values of the blocks: [rows, n].
at::Tensor out_of_blocks(const at::Tensor& blocks, int64_t n) {
  return blocks.reshape({blocks.size(0), blocks.size(1) * blocks.size(2)}).narrow(1, 0, n);
}

at::Tensor magnitude_bits(const at::Tensor& values) {
  return values.view(at::kInt).bitwise_and(0x7fffffff);
}

at::Tensor but_nans(const at::Tensor& bits) { return bits.masked_fill(bits > kInfinityBits, 0); }

// The largest along the last dimension, which stays.
at::Tensor largest(const at::Tensor& bits) { return bits.amax({-1}, /*keepdim=*/true); }

at::Tensor as_float(const at::Tensor& bits) { return bits.view(at::kFloat); }

// Division by a number of the CPU may be a product on a device.
at::Tensor divided(const at::Tensor& values, double by) {
  return values.div(at::full({}, by, values.options()));
}

at::Tensor to_e4m3(const at::Tensor& values) {
  return values.clamp(-448, 448).to(at::kFloat8_e4m3fn).view(at::kByte);
}

at::Tensor from_e4m3(const at::Tensor& codes) {
  return codes.contiguous().view(at::kFloat8_e4m3fn).to(at::kFloat);
}

at::Tensor from_e8m0(const at::Tensor& scales) {
  const auto bits = scales.to(at::kInt);
  const auto normal = bits.bitwise_left_shift(23);
  return as_float(normal.masked_fill(bits == 0, 0x00400000)).masked_fill(bits == 255, kNaN);
}

// kNf4, written by the device: a copy from the host would wait for it.
at::Tensor nf4_values(const at::Tensor& like) {
  std::vector<at::Tensor> values;
  for (const auto value : kNf4)
    values.push_back(at::full({1}, value, like.options().dtype(at::kFloat)));
  return at::cat(values);
}

// The four bytes of a float each: [rows, 4 * floats].
at::Tensor bytes_of(const at::Tensor& floats) { return floats.contiguous().view(at::kByte); }

// Of one code, as scales have it: 2^(scale - 133).
at::Tensor step_of(const at::Tensor& scale) {
  const auto one = at::full({}, 1, scale.options());
  const auto subnormal = one.bitwise_left_shift(scale.clamp_max(6).add(16));
  return as_float(at::where(scale > 6, scale.sub(6).bitwise_left_shift(23), subnormal));
}

// hashed() of seed + i for value i of [rows, n], in blocks.
at::Tensor hashes(const at::Tensor& values, uint64_t seed, int64_t block) {
  constexpr int64_t kWord = 0xffffffff;
  const auto places =
      at::arange(values.numel(), values.options().dtype(at::kLong)).view(values.sizes());
  const auto all = in_blocks(places, block).add(static_cast<int64_t>(seed));
  const auto high =
      all.bitwise_right_shift(32).bitwise_and(kWord).mul(0x9e3779b9).bitwise_and(kWord);
  auto x = all.bitwise_and(kWord).bitwise_xor(high);
  x = x.bitwise_xor(x.bitwise_right_shift(16)).mul(0x7feb352d).bitwise_and(kWord);
  x = x.bitwise_xor(x.bitwise_right_shift(15)).mul(0x846ca68b).bitwise_and(kWord);
  return x.bitwise_xor(x.bitwise_right_shift(16));
}

// As SpecialCodes has them, of all values: uint8.
at::Tensor special_codes(const SpecialCodes& codes, const at::Tensor& values) {
  return at::where(values > 0, codes.positive, codes.negative)
      .masked_fill(values.isfinite(), codes.zero)
      .masked_fill(values.isnan(), codes.nan)
      .to(at::kByte);
}
at::Tensor special_values(const SpecialCodes& codes, const at::Tensor& given) {
  return at::where(given == codes.positive, kInfinity, -kInfinity)
      .to(at::kFloat)
      .masked_fill(given == codes.zero, 0)
      .masked_fill(given == codes.nan, kNaN);
}

void encode_mxint8(const at::Tensor& values, const at::Tensor& codes,
                   std::optional<uint64_t> seed) {
  const auto n = values.size(1);
  const auto blocks = in_blocks(values.to(at::kFloat), Mxint8Block::kSize);
  const auto most = largest(magnitude_bits(blocks));
  auto scale = most.bitwise_right_shift(23);
  const auto special = scale == Mxint8Block::kSpecial;
  if (seed) {
    const auto limit = step_of(scale).mul(127).view(at::kInt);
    scale = scale.add(scale.lt(Mxint8Block::kSpecial - 1).logical_and(most > limit));
  }
  const auto is_small = scale < 6;
  const auto second = as_float(
      at::where(is_small, scale.neg().add(254), scale.neg().add(260)).bitwise_left_shift(23));
  const auto scaled = blocks.mul(is_small.to(at::kFloat).mul(63).add(1)).mul(second);
  auto rounded = scaled.round();
  if (seed) {
    const auto below = scaled.floor();
    const auto part = hashes(values, *seed, Mxint8Block::kSize)
                          .bitwise_right_shift(8)
                          .to(at::kFloat)
                          .mul(0x1p-24);
    rounded = below.add(scaled.sub(below).gt(part));
  }
  rounded = rounded.clamp(-127, 127);
  const auto of_values = at::where(special, special_codes(Mxint8Block::kSpecialCodes, blocks),
                                   rounded.to(at::kChar).view(at::kByte));
  codes.narrow(1, 0, n).copy_(out_of_blocks(of_values, n));
  codes.narrow(1, n, scale.size(1)).copy_(scale.squeeze(-1));
}

}  // namespace

void Mxfp8OnDevices::encode(const at::Tensor& values, const at::Tensor& codes) {
  const auto n = values.size(1);
  const auto blocks = in_blocks(values.to(at::kFloat), Mxfp8Block::kSize);
  const auto most = largest(but_nans(magnitude_bits(blocks)));
  const auto infinite = most == kInfinityBits;
  const auto scale = most.bitwise_right_shift(23).sub(8).clamp_min(0).masked_fill(infinite, 254);
  const auto factor = as_float(scale.neg().add(254).bitwise_left_shift(23));
  const auto alone = blocks.masked_fill(blocks.isfinite(), 0);
  const auto of_values = to_e4m3(at::where(infinite, alone, blocks.mul(factor)));
  codes.narrow(1, 0, n).copy_(out_of_blocks(of_values, n));
  codes.narrow(1, n, scale.size(1)).copy_(scale.squeeze(-1));
}

void Mxfp8OnDevices::decode(const at::Tensor& codes, const at::Tensor& values) {
  const auto n = values.size(1);
  const auto blocks = from_e4m3(in_blocks(codes.narrow(1, 0, n), Mxfp8Block::kSize));
  const auto scale = from_e8m0(codes.narrow(1, n, blocks.size(1))).unsqueeze(-1);
  values.copy_(out_of_blocks(blocks.mul(scale), n));
}

void Mxint8OnDevices::encode(const at::Tensor& values, const at::Tensor& codes) {
  encode_mxint8(values, codes, std::nullopt);
}

void Mxint8OnDevices::encode_at_random(const at::Tensor& values, const at::Tensor& codes,
                                       uint64_t seed) {
  encode_mxint8(values, codes, seed);
}

void Mxint8OnDevices::decode(const at::Tensor& codes, const at::Tensor& values) {
  const auto n = values.size(1);
  const auto bytes = in_blocks(codes.narrow(1, 0, n), Mxint8Block::kSize);
  const auto numbers = bytes.view(at::kChar).to(at::kFloat);
  const auto scale = codes.narrow(1, n, bytes.size(1)).to(at::kInt).unsqueeze(-1);
  const auto decoded =
      at::where(scale == Mxint8Block::kSpecial, special_values(Mxint8Block::kSpecialCodes, bytes),
                numbers.mul(step_of(scale)));
  values.copy_(out_of_blocks(decoded, n));
}

void Fp8RowsOnDevices::encode(const at::Tensor& values, const at::Tensor& codes) {
  const auto n = values.size(1);
  const auto row = values.to(at::kFloat);
  const auto most = as_float(largest(but_nans(magnitude_bits(row))));
  const auto infinite = most == kInfinity;
  const auto scale = divided(most, 448).clamp_min(FLT_MIN).masked_fill(infinite, FLT_MAX);
  const auto kept = row.masked_fill(infinite.logical_and(row.isfinite()), 0);
  codes.narrow(1, 0, n).copy_(to_e4m3(kept.div(scale)));
  codes.narrow(1, n, static_cast<int64_t>(sizeof(float))).copy_(bytes_of(scale));
}

void Fp8RowsOnDevices::decode(const at::Tensor& codes, const at::Tensor& values) {
  const auto n = values.size(1);
  const auto scale =
      codes.narrow(1, n, static_cast<int64_t>(sizeof(float))).contiguous().view(at::kFloat);
  values.copy_(from_e4m3(codes.narrow(1, 0, n)).mul(scale));
}

void Nf4OnDevices::encode(const at::Tensor& values, const at::Tensor& codes) {
  const auto n = values.size(1), rows = values.size(0);
  const auto blocks = in_blocks(values.to(at::kFloat), Nf4::kBlock);
  const auto bits = largest(magnitude_bits(blocks));
  const auto special = bits >= kInfinityBits;
  const auto most = as_float(bits);

  const auto table = nf4_values(blocks);
  const auto bounds = table.narrow(0, 0, 15).add(table.narrow(0, 1, 15)).div(2);
  const auto ratio = blocks.div(most).masked_fill(most == 0, 0);
  const auto nearest = at::bucketize(ratio, bounds, /*out_int32=*/true);
  const auto alone = special_codes(Nf4::kSpecialCodes, blocks).to(at::kInt);
  const auto pairs = at::where(special, alone, nearest).view({rows, -1, 2});
  const auto packed = pairs.select(2, 0).mul(16).add(pairs.select(2, 1));
  codes.narrow(1, 0, (n + 1) / 2).copy_(packed.narrow(1, 0, (n + 1) / 2));

  const auto scales = most.masked_fill(special, kNaN).squeeze(-1);
  const auto missing = Nf4::groups(n) * Nf4::kGroup - scales.size(1);
  const auto groups = at::constant_pad_nd(scales, {0, missing}, kNaN).view({rows, -1, Nf4::kGroup});
  const auto count = groups.isnan().logical_not().sum(-1, /*keepdim=*/true).clamp_min(1);
  const auto sum = groups.to(at::kDouble).nansum({-1}, /*keepdim=*/true);
  const auto mean = sum.div(count.to(at::kDouble)).to(at::kFloat);
  const auto distance = groups.sub(mean);
  const auto farthest = distance.abs().masked_fill(distance.isnan(), 0).amax({-1}, true);
  const auto step = divided(farthest, 448).clamp_min(FLT_MIN);
  codes.narrow(1, (n + 1) / 2, Nf4::blocks(n))
      .copy_(out_of_blocks(to_e4m3(distance.div(step)), Nf4::blocks(n)));
  const auto both = at::cat({mean, step}, -1).view({rows, -1});
  codes.narrow(1, codes.size(1) - Nf4::groups(n) * 8, Nf4::groups(n) * 8).copy_(bytes_of(both));
}

void Nf4OnDevices::decode(const at::Tensor& codes, const at::Tensor& values) {
  const auto n = values.size(1), rows = values.size(0);
  const auto both = codes.narrow(1, codes.size(1) - Nf4::groups(n) * 8, Nf4::groups(n) * 8)
                        .contiguous()
                        .view(at::kFloat)
                        .view({rows, -1, 2})
                        .to(at::kDouble);
  const auto distances = in_blocks(codes.narrow(1, (n + 1) / 2, Nf4::blocks(n)), Nf4::kGroup);
  const auto of_groups = from_e4m3(distances).to(at::kDouble).mul(both.narrow(2, 1, 1));
  const auto scales = of_groups.add(both.narrow(2, 0, 1)).clamp_max(FLT_MAX).to(at::kFloat);
  const auto scale = out_of_blocks(scales, Nf4::blocks(n)).unsqueeze(-1);
  const auto packed = in_blocks(codes.narrow(1, 0, (n + 1) / 2), Nf4::kBlock / 2);
  const auto upper = packed.bitwise_right_shift(4), lower = packed.bitwise_and(15);
  const auto code = at::stack({upper, lower}, -1).flatten(2).to(at::kLong);
  const auto table = nf4_values(codes);
  const auto alone = special_values(Nf4::kSpecialCodes, code);
  const auto decoded = table.index({code}).mul(scale.clamp_min(0));
  values.copy_(out_of_blocks(at::where(scale.isnan(), alone, decoded), n));
}

}  // namespace fsdp::internal
