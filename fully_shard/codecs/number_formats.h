// Numbers of 8 and 4 bits in blocks that share a scale, a row of values at a time:
//
//   Mxfp8    E4M3 in blocks of 32, scales E8M0     (OCP Microscaling Formats, revision 1.0)
//   Mxint8   8-bit integers, as Mxfp8              (the same)
//   Fp8Rows  E4M3, one scale for the row           (OCP 8-bit Floating Point, revision 1.0)
//   Nf4      NormalFloat of 4 bits in blocks of 64, their scales quantised once more
//            (Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", 2023)
//
// Each has row_bytes(n), encode(values, n, codes) and decode(codes, n, values), n values
// of a row. Codes come first in it, then scales; the last block may be shorter. Values
// that are not finite arrive as they are; what that costs the rest of their block stands
// with each format. Loops over a block have a constant number of turns, which compilers
// turn into vector instructions. Pure.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

namespace fsdp::internal {

inline constexpr int32_t kInfinityBits = 0x7f800000;
inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// The magnitudes of floats are ordered as their bits are; NaNs are above infinity.
inline int32_t magnitude_bits(float value) { return std::bit_cast<int32_t>(value) & 0x7fffffff; }
inline bool is_finite(float value) { return magnitude_bits(value) < kInfinityBits; }
inline bool is_nan(float value) { return magnitude_bits(value) > kInfinityBits; }

// The largest magnitude of `count` values, as bits; of those that are no NaNs.
template <int64_t count>
int32_t largest_but_nans(const float* values) {
  int32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const auto bits = magnitude_bits(values[i]);
    largest = std::max(largest, bits > kInfinityBits ? 0 : bits);
  }
  return largest;
}

// E4M3: a sign, 4 bits of exponent, 3 of mantissa; the largest is 448, and there is no
// infinity. Rounded to the nearest, ties to even; what is larger becomes 448.
inline uint32_t to_e4m3(float value) {
  constexpr auto kLargest = std::bit_cast<int32_t>(448.0f);
  constexpr auto kSmallestNormal = std::bit_cast<int32_t>(0x1p-6f);
  const auto given = magnitude_bits(value), magnitude = std::min(given, kLargest);
  // Below 2^-6 the steps are 2^-9, those of floats from 2^14 on.
  const auto subnormal = std::bit_cast<int32_t>(std::bit_cast<float>(magnitude) + 0x1p14f) -
                         std::bit_cast<int32_t>(0x1p14f);
  const auto rounded = (magnitude - (120 << 23) + 0x7ffff + ((magnitude >> 20) & 1)) >> 20;
  // Masks, since branches would keep compilers from using vectors.
  const int32_t is_subnormal = -(magnitude < kSmallestNormal), is_nan = -(given > kInfinityBits);
  const auto code = (subnormal & is_subnormal) | (rounded & ~is_subnormal) | (is_nan & 0x7f);
  return static_cast<uint32_t>(code) | (std::bit_cast<uint32_t>(value) >> 31 << 7);
}

constexpr float from_e4m3(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  if ((code & 0x7f) == 0x7f) return kNaN;
  float value = exponent == 0 ? 0x1p-9f * mantissa : 0x1p-10f * (8 + mantissa);
  for (int i = 0; i < exponent; ++i) value *= 2;
  return (code & 0x80) != 0 ? -value : value;
}

inline constexpr auto kE4m3 = [] {
  std::array<float, 256> values = {};
  for (size_t code = 0; code < values.size(); ++code)
    values[code] = from_e4m3(static_cast<uint8_t>(code));
  return values;
}();

// E8M0: a power of two, of exponents from -127; 255 is NaN.
inline float from_e8m0(uint8_t scale) {
  if (scale == 255) return kNaN;
  return std::bit_cast<float>(scale == 0 ? 0x00400000u : static_cast<uint32_t>(scale) << 23);
}

// code_of(i) for each place of a block: in words first, which vectors have as many of as
// of floats, and then narrowed.
template <int64_t count, class CodeOf>
void write_codes(uint8_t* codes, const CodeOf& code_of) {
  std::array<uint32_t, static_cast<size_t>(count)> words;
  for (int64_t i = 0; i < count; ++i) words[static_cast<size_t>(i)] = code_of(i);
  for (int64_t i = 0; i < count; ++i)
    codes[i] = static_cast<uint8_t>(words[static_cast<size_t>(i)]);
}

// 32 bits for a place, of which each depends on all of it (the mixing steps are those of
// C. Wellons, "Prospecting for Hash Functions", 2018).
inline uint32_t hashed(uint64_t place) {
  auto x = static_cast<uint32_t>(place) ^ (static_cast<uint32_t>(place >> 32) * 0x9e3779b9u);
  x = (x ^ x >> 16) * 0x7feb352du;
  x = (x ^ x >> 15) * 0x846ca68bu;
  return x ^ x >> 16;
}

// What the codes of a block say of its values where one of them is not finite; of finite
// values nothing, and they become 0.
struct SpecialCodes {
  uint8_t zero, nan, positive, negative;

  uint8_t code_of(float value) const {
    if (is_finite(value)) return zero;
    if (is_nan(value)) return nan;
    return value > 0 ? positive : negative;
  }
  float value_of(uint8_t code) const {
    if (code == zero) return 0;
    if (code == nan) return kNaN;
    return code == positive ? kInfinity : -kInfinity;
  }
};

// Blocks of `size` values, each with one byte of scale: encode_block(values, codes) gives
// it, decode_block(codes, scale, values) takes it.
template <class Block, int64_t size>
struct ScaledBlocks {
  static int64_t row_bytes(int64_t n) { return n + (n + size - 1) / size; }

  static void encode(const float* values, int64_t n, uint8_t* codes) {
    encode_blocks(values, n, codes, [](const float* block, uint8_t* to, int64_t) {
      return Block::encode_block(block, to);
    });
  }

  static void decode(const uint8_t* codes, int64_t n, float* values) {
    const auto* scales = codes + n;
    int64_t i = 0;
    for (; i + size <= n; i += size) Block::decode_block(codes + i, *scales++, values + i);
    if (i == n) return;
    std::array<uint8_t, size> padded = {};
    std::array<float, size> short_values;
    std::copy(codes + i, codes + n, padded.begin());
    Block::decode_block(padded.data(), *scales, short_values.data());
    std::copy_n(short_values.begin(), n - i, values + i);
  }

 protected:
  // encode_block(values, codes, first) of the block whose first value is number `first`.
  template <class EncodeBlock>
  static void encode_blocks(const float* values, int64_t n, uint8_t* codes,
                            const EncodeBlock& encode_block) {
    auto* scales = codes + n;
    int64_t i = 0;
    for (; i + size <= n; i += size) *scales++ = encode_block(values + i, codes + i, i);
    if (i == n) return;
    std::array<float, size> padded = {};
    std::array<uint8_t, size> short_codes;
    std::copy(values + i, values + n, padded.begin());
    *scales = encode_block(padded.data(), short_codes.data(), i);
    std::copy_n(short_codes.begin(), n - i, codes + i);
  }
};

// In a block with an infinity the scale is the largest, 2^127, and finite values become
// 0.
struct Mxfp8Block {
  static constexpr int64_t kSize = 32;

  static uint8_t encode_block(const float* values, uint8_t* codes) {
    const auto largest = largest_but_nans<kSize>(values);
    if (largest == kInfinityBits) {
      write_codes<kSize>(
          codes, [values](int64_t i) { return to_e4m3(is_finite(values[i]) ? 0 : values[i]); });
      return 254;
    }
    const int scale = std::max((largest >> 23) - 8, 0);  // 8: the exponent of 448
    const auto factor = std::bit_cast<float>((254 - scale) << 23);
    write_codes<kSize>(codes, [=](int64_t i) { return to_e4m3(values[i] * factor); });
    return static_cast<uint8_t>(scale);
  }

  static void decode_block(const uint8_t* codes, uint8_t scale, float* values) {
    const auto factor = from_e8m0(scale);
    for (int64_t i = 0; i < kSize; ++i) values[i] = kE4m3[codes[i]] * factor;
  }
};
using Mxfp8 = ScaledBlocks<Mxfp8Block, Mxfp8Block::kSize>;

// Multiples of 1/64 up to 127/64. A block with values that are not finite has the scale
// NaN, by which the specification makes all of it NaN; here its codes are special ones.
struct Mxint8Block {
  static constexpr int64_t kSize = 32;
  static constexpr uint8_t kSpecial = 255;
  static constexpr SpecialCodes kSpecialCodes = {0, 0x80, 127, 0x81};  // -128, -127

  static uint8_t encode_block(const float* values, uint8_t* codes) {
    return encode_with(values, codes, exponent_of(values),
                       [](float value, int64_t) { return value; });
  }

  // Rounded up or down at random, so that the mean is the value: up where `random`, which
  // gives 32 bits for each place in the block, is below the rest.
  template <class Random>
  static uint8_t encode_at_random(const float* values, uint8_t* codes, const Random& random) {
    auto scale = exponent_of(values);
    // The largest must not be cut off.
    if (scale < kSpecial - 1 && largest_but_nans<kSize>(values) > largest_code_bits(scale)) ++scale;
    return encode_with(values, codes, scale, [&random](float value, int64_t i) {
      const auto below = std::floor(value);
      const auto part = static_cast<float>(random(i) >> 8) * 0x1p-24f;  // [0, 1)
      return below + (value - below > part ? 1.0f : 0.0f);
    });
  }

  static void decode_block(const uint8_t* codes, uint8_t scale, float* values) {
    if (scale == kSpecial) {
      for (int64_t i = 0; i < kSize; ++i) values[i] = kSpecialCodes.value_of(codes[i]);
      return;
    }
    const auto factor = step(scale);
    for (int64_t i = 0; i < kSize; ++i)
      values[i] = static_cast<float>(static_cast<int8_t>(codes[i])) * factor;
  }

 private:
  // Of the largest value, biased; kSpecial where one is not finite.
  static uint8_t exponent_of(const float* values) {
    int32_t largest = 0;
    for (int64_t i = 0; i < kSize; ++i) largest = std::max(largest, magnitude_bits(values[i]));
    return static_cast<uint8_t>(std::min(largest >> 23, int32_t{kSpecial}));
  }
  static float step(uint8_t scale) {
    return std::bit_cast<float>(scale > 6 ? (scale - 6u) << 23 : 1u << (scale + 16));
  }
  static int32_t largest_code_bits(uint8_t scale) {
    return std::bit_cast<int32_t>(127 * step(scale));
  }

  template <class Round>
  static uint8_t encode_with(const float* values, uint8_t* codes, uint8_t scale,
                             const Round& round) {
    if (scale == kSpecial) {
      for (int64_t i = 0; i < kSize; ++i) codes[i] = kSpecialCodes.code_of(values[i]);
      return kSpecial;
    }
    // 1 / step(scale), in two factors where it is too large for a float.
    const auto first = scale < 6 ? 64.0f : 1.0f;
    const auto second = std::bit_cast<float>((scale < 6 ? 254u - scale : 260u - scale) << 23);
    write_codes<kSize>(codes, [&](int64_t i) {
      const auto value = round(values[i] * first * second, i);
      // Rounded by floats of which 1 is the smallest step.
      const auto shifted = std::bit_cast<int32_t>(value + 0x1.8p23f);
      const auto code = shifted - std::bit_cast<int32_t>(0x1.8p23f);
      return static_cast<uint32_t>(std::min(std::max(code, -127), 127));
    });
    return scale;
  }
};
struct Mxint8 : ScaledBlocks<Mxint8Block, Mxint8Block::kSize> {
  // Value i of the row is rounded by the hash of seed + i.
  static void encode_at_random(const float* values, int64_t n, uint8_t* codes, uint64_t seed) {
    encode_blocks(values, n, codes, [seed](const float* block, uint8_t* to, int64_t first) {
      const auto begin = seed + static_cast<uint64_t>(first);
      return Mxint8Block::encode_at_random(
          block, to, [begin](int64_t i) { return hashed(begin + static_cast<uint64_t>(i)); });
    });
  }
};

// One scale, a float: that of the largest value. In a row with an infinity finite values
// become 0.
struct Fp8Rows {
  static int64_t row_bytes(int64_t n) { return n + static_cast<int64_t>(sizeof(float)); }

  static void encode(const float* values, int64_t n, uint8_t* codes) {
    const auto largest = largest_of(values, n);
    const bool has_infinity = largest == kInfinity;
    // 448 times the largest float is infinity.
    const auto scale = has_infinity ? FLT_MAX : std::max(largest / 448.0f, FLT_MIN);
    for (int64_t i = 0; i < n; ++i) {
      const auto value = has_infinity && is_finite(values[i]) ? 0.0f : values[i];
      codes[i] = to_e4m3(value / scale);
    }
    std::memcpy(codes + n, &scale, sizeof scale);
  }

  static void decode(const uint8_t* codes, int64_t n, float* values) {
    float scale = 0;
    std::memcpy(&scale, codes + n, sizeof scale);
    for (int64_t i = 0; i < n; ++i) values[i] = kE4m3[codes[i]] * scale;
  }

 private:
  static float largest_of(const float* values, int64_t n) {
    constexpr int64_t kAtOnce = 32;
    int32_t largest = 0;
    int64_t i = 0;
    for (; i + kAtOnce <= n; i += kAtOnce)
      largest = std::max(largest, largest_but_nans<kAtOnce>(values + i));
    for (; i < n; ++i) largest = std::max(largest, largest_but_nans<1>(values + i));
    return std::bit_cast<float>(largest);
  }
};

// The quantiles of a normal distribution, as the paper's appendix E has them.
inline constexpr std::array<float, 16> kNf4 = {
    -1.0f,
    -0.6961928009986877f,
    -0.5250730514526367f,
    -0.39491748809814453f,
    -0.28444138169288635f,
    -0.18477343022823334f,
    -0.09105003625154495f,
    0.0f,
    0.07958029955625534f,
    0.16093020141124725f,
    0.24611230194568634f,
    0.33791524171829224f,
    0.44070982933044434f,
    0.5626170039176941f,
    0.7229568362236023f,
    1.0f,
};

// Two codes in a byte, the first in its upper half. A block's scale is its largest value;
// scales become E4M3 of their distance from the mean of 256 of them. Behind the codes are
// these bytes, then for each 256 their mean and the step of the distances, two floats. A
// block with values that are not finite has the scale NaN, and special codes.
struct Nf4 {
  static constexpr int64_t kBlock = 64;   // values that share a scale
  static constexpr int64_t kGroup = 256;  // scales that share a mean and a step
  static constexpr SpecialCodes kSpecialCodes = {7, 8, 15, 0};

  static int64_t blocks(int64_t n) { return (n + kBlock - 1) / kBlock; }
  static int64_t groups(int64_t n) { return (blocks(n) + kGroup - 1) / kGroup; }
  static int64_t row_bytes(int64_t n) {
    return (n + 1) / 2 + blocks(n) + groups(n) * static_cast<int64_t>(2 * sizeof(float));
  }

  static void encode(const float* values, int64_t n, uint8_t* codes) {
    auto* const scales = codes + (n + 1) / 2;
    auto* const groups_at = scales + blocks(n);
    for (int64_t group = 0; group < groups(n); ++group) {
      std::array<float, kGroup> largest;
      const auto first = group * kGroup, count = std::min(kGroup, blocks(n) - first);
      for (int64_t i = 0; i < count; ++i) {
        const auto begin = (first + i) * kBlock, length = std::min(kBlock, n - begin);
        largest[static_cast<size_t>(i)] = encode_block(values + begin, length, codes + begin / 2);
      }
      const auto [mean, step] = mean_and_step(largest.data(), count);
      for (int64_t i = 0; i < count; ++i)
        scales[first + i] = to_e4m3((largest[static_cast<size_t>(i)] - mean) / step);
      const std::array<float, 2> both = {mean, step};
      std::memcpy(groups_at + group * static_cast<int64_t>(sizeof both), both.data(), sizeof both);
    }
  }

  static void decode(const uint8_t* codes, int64_t n, float* values) {
    const auto* const scales = codes + (n + 1) / 2;
    const auto* const groups_at = scales + blocks(n);
    std::array<float, 2> mean_and_step = {};
    for (int64_t block = 0; block < blocks(n); ++block) {
      if (block % kGroup == 0)
        std::memcpy(mean_and_step.data(),
                    groups_at + block / kGroup * static_cast<int64_t>(sizeof mean_and_step),
                    sizeof mean_and_step);
      // In double the product is exact, so that a fused addition gives the same.
      const auto distance = double{kE4m3[scales[block]]} * double{mean_and_step[1]};
      // The sum may be beyond what a float can hold.
      const auto sum = std::min(distance + double{mean_and_step[0]}, double{FLT_MAX});
      const auto scale = static_cast<float>(sum);
      const auto begin = block * kBlock;
      decode_block(codes + begin / 2, std::min(kBlock, n - begin), scale, values + begin);
    }
  }

 private:
  struct MeanAndStep {
    float mean, step;
  };

  // The values' largest, by which they were divided; NaN where one is not finite.
  static float encode_block(const float* values, int64_t n, uint8_t* codes) {
    int32_t bits = 0;
    for (int64_t i = 0; i < n; ++i) bits = std::max(bits, magnitude_bits(values[i]));
    const auto largest = std::bit_cast<float>(bits);
    const bool is_special = bits >= kInfinityBits;
    const auto code_of = [&](float value) {
      return is_special ? kSpecialCodes.code_of(value)
                        : nearest(largest == 0 ? 0 : value / largest);
    };
    for (int64_t i = 0; i < n; i += 2) {
      const auto second = i + 1 < n ? code_of(values[i + 1]) : kSpecialCodes.zero;
      codes[i / 2] = static_cast<uint8_t>(code_of(values[i]) << 4 | second);
    }
    return is_special ? kNaN : largest;
  }

  static uint8_t nearest(float value) {
    int code = 0;
    for (size_t i = 0; i + 1 < kNf4.size(); ++i) code += value > (kNf4[i] + kNf4[i + 1]) / 2;
    return static_cast<uint8_t>(code);
  }

  static MeanAndStep mean_and_step(const float* scales, int64_t n) {
    double sum = 0;
    int64_t count = 0;
    for (int64_t i = 0; i < n; ++i) {
      if (is_nan(scales[i])) continue;
      sum += scales[i];
      ++count;
    }
    const auto mean = static_cast<float>(sum / static_cast<double>(std::max<int64_t>(count, 1)));
    float farthest = 0;
    for (int64_t i = 0; i < n; ++i)
      if (!is_nan(scales[i])) farthest = std::max(farthest, std::abs(scales[i] - mean));
    return {mean, std::max(farthest / 448.0f, FLT_MIN)};
  }

  static void decode_block(const uint8_t* codes, int64_t n, float scale, float* values) {
    const bool is_special = is_nan(scale);
    const auto positive = std::max(scale, 0.0f);  // a scale near 0 may have been rounded below
    for (int64_t i = 0; i < n; ++i) {
      const auto code = static_cast<uint8_t>(i % 2 == 0 ? codes[i / 2] >> 4 : codes[i / 2] & 15);
      values[i] = is_special ? kSpecialCodes.value_of(code) : kNf4[code] * positive;
    }
  }
};

}  // namespace fsdp::internal
